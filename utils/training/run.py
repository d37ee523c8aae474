"""One training run: what all of its parts share. Only modules of utils/training may import this one."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim import Optimizer

from utils.core.bars import Bar
from utils.core.distributed import made_on_main_process, make_accelerator, on_main_process, waited_for
from utils.core.entrypoint import at_end
from utils.core.errors import UserError
from utils.core.launcher import check_accumulation
from utils.core.signals import EXIT_STOPPED, StopSignal, leave_on_signal
from utils.data.autoencoder import Autoencoder
from utils.data.dataset import content_fingerprint
from utils.data.training_data import TrainingData
from utils.diagnostics.data_checks.kept import records_of_images
from utils.diagnostics.probe import examine
from utils.diffusion.export import check_export
from utils.diffusion.hub import check_hub, has_pipeline, push_to_hub
from utils.diffusion.objective import Objective
from utils.diffusion.sampling import sampling_steps
from utils.diffusion.unet import network_options
from utils.evaluation.quality import MIN_IMAGES
from utils.optim.clipping import AdaptiveLimit, FixedLimit
from utils.optim.ema import EMA
from utils.optim.power_ema import make_ema
from utils.options.flags import AnyRun, RunOptions
from utils.options.paths import DIGITS
from utils.runs.checkpoint_files import list_checkpoints
from utils.runs.checkpoints import attach_state_hooks, resume
from utils.runs.ema_snapshots import remove_snapshots_beyond
from utils.runs.folder import RunFolder
from utils.runs.record import RunRecord
from utils.runs.start import LENGTH, Start, done_line, start_of
from utils.runs.state import TrainState, read_state
from utils.training.attempts import Attempts
from utils.training.doctor import Doctor
from utils.training.length import RunLength, about_small_set
from utils.training.memory_plan import DiskPlan
from utils.training.pretrained import settle_scale, spread
from utils.training.progress import ProgressBar
from utils.training.trackers import Trackers, start_trackers


@dataclass(frozen=True, kw_only=True)
class Run:
    """Made whole by `begin_run`, after the state is loaded; of its parts only `state` changes."""

    options: RunOptions
    accelerator: Accelerator
    folder: RunFolder
    data: TrainingData
    objective: Objective
    ema: EMA | None
    ema_decay: Callable[[int], float]  # at the n-th update; None without an EMA
    clipping: AdaptiveLimit | FixedLimit
    state: TrainState  # its `step` is the number of finished updates, the only clock
    length: RunLength
    facts: dict[str, Any]  # what followed from the options: for options.json, the doctor and reports
    progress: ProgressBar
    trackers: Trackers
    doctor: Doctor
    stop: StopSignal
    resumed_from: Path | None  # a checkpoint
    attempts: Attempts  # at what it can do without

    @property
    def output_dir(self) -> Path:
        return self.folder.path

    def averaged(self) -> AbstractContextManager:
        """Inside it the network has the averaged weights, where there are any."""
        return self.ema.swapped_into_model() if self.ema is not None else nullcontext()

    def stopping(self) -> bool:
        """Whether this process was asked to stop; a look costs nothing."""
        return self.stop.received is not None

    def print_line(self, message: str) -> None:
        self.progress.print_line(message)


def start_processes(options: RunOptions, broadcast_buffers: bool = False) -> Accelerator:
    """`broadcast_buffers`: whether training moves the network's buffers, which are constants else. Raises UserError for
    launches, trackers and precisions that no run can use."""
    leave_on_signal()
    check_accumulation(options.gradient_accumulation_steps)
    return make_accelerator(
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        trackers=options.trackers,
        project_dir=str(Path(options.output_dir, options.logging_dir)),
        cpu_threads=options.cpu_threads,
        collective_timeout=options.collective_timeout,
        tf32=options.tf32,
        cudnn_benchmark=options.cudnn_benchmark,
        deterministic=options.deterministic,
        broadcast_buffers=broadcast_buffers,
    )


def claim_folder(options: RunOptions, accelerator: Accelerator) -> RunFolder | None:
    """The folder of the run, or None where it holds a finished run of the same options. Trackers and the Hub, which may
    refuse, come first. Raises UserError, see `start_of`, `check_hub`, `start_trackers` and `RunFolder.claim`."""
    global_batch_size = accelerator.num_processes * options.micro_batch_size * options.gradient_accumulation_steps
    launched = {"global_batch_size": global_batch_size, "mixed_precision": accelerator.mixed_precision}
    start = made_on_main_process(accelerator, "looking at the folder", start_of, options, launched)
    if start is Start.DONE:
        if options.push_to_hub:
            raise UserError(f"{done_line(options)}\npush it with --output_dir {options.output_dir} --push_to_hub alone")
        on_main_process(accelerator, "saying that it is done", print, done_line(options))
        return None
    if options.push_to_hub:
        on_main_process(accelerator, "asking the Hub", _announce_push, options)
    on_main_process(accelerator, "starting the trackers", start_trackers, accelerator, options)
    folder = RunFolder(Path(options.output_dir))
    names = ("pretrained", *options.marked("path"))  # the first that is in the way is told, and this one may have set --vae
    inputs = {name: getattr(options, name) for name in names if name not in ("output_dir", "cache_dir")}
    if options.dataset_name == DIGITS:
        del inputs["dataset_name"]
    claim = {"replaces": start is Start.NEW, "inputs": inputs}
    on_main_process(accelerator, "claiming the folder", folder.claim, **claim)
    return folder


def load_data(options: RunOptions, accelerator: Accelerator, autoencoder: Autoencoder | None = None) -> TrainingData:
    """Images, or with an `autoencoder` latents. Raises UserError for anything about the data that a user can mend."""
    shown = accelerator.is_main_process and not options.quiet
    with Bar(what := "reading the images", shown=shown) as bar, waited_for(accelerator, what):  # one of each machine packs them
        data = TrainingData(options, accelerator, bar.set)
    if autoencoder is not None:
        with Bar(what := "encoding the images", shown=shown) as bar, waited_for(accelerator, what):
            latents = data.encode(options, accelerator, autoencoder, bar.set)
        data.images.notes.extend(settle_scale(options, autoencoder, latents))
        data.kept = autoencoder.facts()
    return data


def begin_run(
    options: RunOptions,
    accelerator: Accelerator,
    folder: RunFolder,
    data: TrainingData,
    objective: Objective,
    optimizer: Optimizer,
) -> Run:
    """A fresh run, or a resumed one, ready for its next update, on every process. Raises UserError where the checkpoint does
    not fit the options, or the folder cannot be written."""
    length = RunLength.of(options, len(data.training), accelerator.num_processes)
    shown = accelerator.is_main_process and not options.quiet
    with Bar(what := "testing the export of the network", shown=shown):
        on_main_process(accelerator, what, check_export, objective.exported, objective.noise_scheduler, folder.path)
    kept = {**objective.kept, **data.kept}
    ema, ema_decay = make_ema(objective.exported, options)
    state = TrainState(
        options=options.shaping(
            mixed_precision=accelerator.mixed_precision,
            global_batch_size=length.global_batch_size,
            data_fingerprint=content_fingerprint(data.images),
            **network_options(objective.exported),
            **kept,
        ),
        max_train_steps=length.max_train_steps,
    )
    attach_state_hooks(accelerator, ema, state)
    asked_epsilon = optimizer.param_groups[0].get("eps")
    free = vars(options).keys() - options.shaping().keys()  # may change in any case
    resumed, allowed = options.resume_from_checkpoint, [name for name in options.allow_option_change if name not in free]
    with Bar("reading the checkpoint", shown=shown):
        checkpoint, notes = resume(accelerator, folder.path, resumed, state, allowed)
    notes = [*(f"warning: {useless}" for useless in options.without_effect()), *data.images.notes, *objective.notes, *notes]
    epsilon = optimizer.param_groups[0].get("eps")  # the checkpoint's, where there was one; SGD has none
    if epsilon != asked_epsilon:
        notes.append(f"the optimizer keeps the checkpoint's epsilon, {epsilon:.3g}; a new run would use {asked_epsilon:.3g}")
    facts = {
        "max_train_steps": length.max_train_steps,
        **length._asdict(),
        "micro_batch_size": options.train_batch_size,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "optimizer_epsilon": epsilon,
        "device": str(accelerator.device),
        "cpu_threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in objective.exported.parameters()),
        "training_images": len(data.training),
        "validation_images": len(data.validation),
        "classes": objective.classes,
        **kept,
    }
    dropout = objective.exported.config.get("dropout", 0.0)
    notes = [*about_small_set(len(data.training), facts["parameters"], length, dropout), *notes]
    _check_samples(options, len(data.training), objective)
    if state.step < length.max_train_steps:
        on_main_process(accelerator, "looking at the disk", _check_disk, folder, data, objective, state, length, options)
    names = data.images.class_names if objective.classes else None
    on_main_process(accelerator, "beginning in the folder", folder.begin, options, facts, names)
    if accelerator.is_main_process:
        at_end(lambda status: folder.release(status) if status == EXIT_STOPPED else None)  # before the first update
    on_main_process(accelerator, "removing later snapshots", remove_snapshots_beyond, folder.path, state.step)

    stop = StopSignal(accelerator.num_processes, options.collective_timeout, tells=accelerator.is_main_process)
    progress = ProgressBar(accelerator.is_main_process, state.step, length.max_train_steps, quiet=options.quiet)
    attempts = Attempts(accelerator, folder.path, state, progress.print_line, options.collective_timeout)
    with waited_for(accelerator, "starting the trackers"):
        trackers = Trackers(accelerator, options, state.step, progress.print_line)
        trackers.describe(options.recorded() | facts)
    doctor = Doctor(
        folder.path,
        options=vars(options),
        resolved=facts,
        first_step=state.step,
        expected_reports=length.max_train_steps // options.logging_steps,
        enabled=accelerator.is_main_process,
        print_line=progress.print_line,
        log=trackers.log,
    )
    clipping = AdaptiveLimit(accelerator.device, state.grad_norm_mean)
    if not options.adaptive_clipping:
        clipping = FixedLimit(options.max_grad_norm)
    for note in (", ".join(f"{name} {value}" for name, value in facts.items() if name not in kept), *notes):
        progress.print_line(note)
    run = Run(
        options=options,
        accelerator=accelerator,
        folder=folder,
        data=data,
        objective=objective,
        ema=ema,
        ema_decay=ema_decay,
        clipping=clipping,
        state=state,
        length=length,
        facts=facts,
        progress=progress,
        trackers=trackers,
        doctor=doctor,
        stop=stop,
        resumed_from=checkpoint,
        attempts=attempts,
    )
    measured = doctor.knows("data") and checkpoint is not None and read_state(checkpoint).options == state.options
    with waited_for(accelerator, "checking the images"):
        if accelerator.is_main_process and not measured:  # what was measured with other options may be of other images
            _look_at_data(run)
        if accelerator.is_main_process:
            doctor.look()  # what the data and the options say alone is said before the first update
    return run


def _look_at_data(run: Run) -> None:
    """Records what the images, the noise schedule and the network are like."""
    data, objective = run.data, run.objective
    schedule = {"schedule": shape} if (shape := objective.schedule()) else {}
    with run.progress.part("checking the images"):
        sets, flip = (data.training, data.validation), run.options.random_flip
        about = records_of_images(*sets, seed=run.options.seed, random_flip=flip, folder=run.output_dir)
    if data.encoded is not None:
        about["data"]["latent_spread"] = spread(data.encoded.autoencoder, data.encoded.latents)
    run.doctor.record(run.state.step, about | {"network": examine(objective, data.samples)} | schedule)


def _check_samples(options: RunOptions, training_images: int, objective: Objective) -> None:
    """Raises UserError for samples that cannot be made or evaluated, before an earlier run in the folder is deleted."""
    if options.eval_steps and training_images < 2 * MIN_IMAGES:
        raise UserError(
            f"--eval_steps: {training_images} training images are too few\n"
            f"use at least {2 * MIN_IMAGES} training images, or leave --eval_steps out"
        )
    sampling_steps(options.sampler, options.sampling_steps, objective.noise_scheduler, flag=options.sampling_flag)


def _check_disk(
    folder: RunFolder, data: TrainingData, objective: Objective, state: TrainState, length: RunLength, options: RunOptions
) -> None:
    network = sum(tensor.numel() * tensor.element_size() for tensor in objective.network.state_dict().values())
    checkpoints = len(list_checkpoints(folder.path)) if state.step else 0
    carried = data.autoencoder.bytes if data.autoencoder else 0
    plan = DiskPlan(options, network, length.max_train_steps, state.step, checkpoints, carried)
    plan.check(folder.path, folder.size())


def _announce_push(options: RunOptions) -> None:
    print("asking the Hub whether the pipeline can be pushed", flush=True)
    print(f"at the end, the pipeline will be pushed to {check_hub(options)}", flush=True)


def train_or_push(train: Callable[[AnyRun], int]) -> Callable[[AnyRun], int]:
    """`train`, but for options that ask for nothing else than the push of a run that has ended. Returns the exit status."""

    def run(options: AnyRun) -> int:
        if not pushes_alone(options):
            return train(options)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{options.output_dir} holds a finished run: its pipeline will be pushed, nothing is trained")
            check_hub(options)
            print(f"pushed to {push_to_hub(options)}")
        return 0

    return run


def pushes_alone(options: RunOptions) -> bool:
    """Whether the run in the folder has ended well and no flag that was given asks for another run or a longer one."""
    folder = Path(options.output_dir)
    if not options.push_to_hub or options.overwrite_output_dir or options.dry_run or not has_pipeline(folder):
        return False
    try:
        record = RunRecord.read(folder)
    except UserError:
        return False
    asked = options.shaping() | {name: getattr(options, name) for name in LENGTH}
    given = {name: value for name, value in asked.items() if name in options.given}
    return record.exit_status == 0 and all(record.options.get(name) == value for name, value in given.items())
