"""Whether a training fits its device and its disk, and how to make it fit: predicted first, then tried out."""

import gc
import shutil
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from utils.core.bars import Bar
from utils.core.distributed import from_main_process, local_processes, objects_from_all, on_main_process
from utils.core.errors import UserError, explain_out_of_memory, out_of_memory
from utils.core.files import read_json
from utils.core.limits import free_ram
from utils.data.autoencoder import Autoencoder
from utils.optim.optimizers import state_bytes
from utils.options.flags import RunOptions
from utils.options.presets import small_preset
from utils.runs.ema_snapshots import DTYPES, Snapshots
from utils.training.doctor import foretold
from utils.training.length import divisors, per_process, split_batch
from utils.training.memory_estimate import (
    GIB,
    SHARE,
    MemoryEstimate,
    TrialStep,
    UpdateParts,
    estimate_memory,
    flops_per_image,
    storage_bytes,
)

MIB = 2**20


@dataclass(frozen=True)
class DiskPlan:
    """`network` is the bytes of its parameters and buffers in fp32. Counts what is large and foreseen: checkpoints, EMA
    snapshots and the pipeline; no pictures, no logs and no checkpoint of a stop."""

    options: RunOptions
    network: int
    updates: int  # of the whole run
    step: int = 0  # updates that are done
    checkpoints: int = 0  # that are there
    autoencoder: int = 0  # bytes of the one that the pipeline carries

    def parts(self) -> dict[str, int]:
        """What there will be -> the most bytes at once, a file being written beside the one that it replaces."""
        options, count = self.options, self._checkpoints()
        one = self.network * (1 + options.num_averages) + state_bytes(options, self.network)
        found = {f"{count} checkpoint{'s' * (count > 1)}": count * one, "the pipeline": 2 * (self.network + self.autoencoder)}
        if options.use_ema and options.ema_type == "power":
            every = options.ema_snapshot_steps or max(1, self.updates // Snapshots.PER_RUN)
            count = options.num_averages * (self.updates // every + 1)
            found[f"{count} EMA snapshots"] = count * self.network * DTYPES[options.ema_snapshot_dtype].itemsize // 4
        return found

    def _checkpoints(self) -> int:
        """One that is being written beside those that are kept, of which one may be the best."""
        options = self.options
        judged = bool(options.validation_images or options.best_metric != "loss")
        most = max(options.checkpoints_total_limit or 0, 2) + judged + 1
        every = options.checkpointing_steps
        in_all = self.checkpoints + self.updates // every - self.step // every + judged
        return in_all if options.checkpoints_total_limit is None else min(in_all, most)

    def line(self, folder: Path, there: int = 0) -> str:
        """Returns what is needed and what is free; `there`: bytes of the run in the folder, which is replaced or goes on."""
        parts = self.parts()
        needed = ", ".join(f"{name} {shown(size)}" for name, size in parts.items() if size)
        free = f"{shown(free_bytes(folder) + there)} are free for {folder}"
        return f"the run will need {shown(sum(parts.values()))} of disk ({needed}); {free}"

    def check(self, folder: Path, there: int = 0) -> None:
        """Raises UserError where the disk of `folder` has no room for it."""
        if sum(self.parts().values()) > free_bytes(folder) + there:
            advice = "make room, set a smaller --checkpoints_total_limit (2 at least), or set another --output_dir"
            raise UserError(f"{self.line(folder, there)}\n{advice}")


def free_bytes(folder: Path) -> int:
    """Of the file system that the folder is on, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def shown(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


MOST_ON_CPU = 20_000_000  # parameters: the presets for CPUs have 4 M at most, those for GPUs 36 M at least
EXIT_DOES_NOT_FIT = 3  # of a dry run
PEAK = "at the worst moment of an update: not the sum, gradients come while activations go"
NO_ACTIVATIONS = (
    "reports are without activations, and the doctor sees no forward passes: an eager update is predicted not to fit"
)


class MemoryPlan:
    """What one process of a training needs.

    Args:
        make_network: builds the network that options mean, on torch's default device.
        make_optimizer: builds the optimizer of a network.
        autoencoder: whose latents the network sees, where it does not see the images.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        options: RunOptions,
        make_network: Callable[[RunOptions], nn.Module],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        autoencoder: Autoencoder | None = None,
    ):
        self._accelerator, self._options = accelerator, options
        self._make_network, self._make_optimizer, self._autoencoder = make_network, make_optimizer, autoencoder
        self._sharing = local_processes(accelerator) if accelerator.device.type == "cpu" else 1
        self.free = free_memory(accelerator.device, self._sharing)  # before anything is there
        self._untried = False

    def _parts(self, **changes: Any) -> UpdateParts:
        """Of an update with the options, but for these."""
        options, accelerator = replace(self._options, **changes) if changes else self._options, self._accelerator
        return UpdateParts(
            partial(self._make_network, options),
            self._make_optimizer,
            image_shape=self._autoencoder.latent_shape if self._autoencoder else options.image_shape,
            mixed_precision=changes.get("mixed_precision", accelerator.mixed_precision),
            averages=options.num_averages,
            distributed=accelerator.num_processes > 1,
        )

    def estimate(self, micro_batch_size: int, accumulation: int, **changes: Any) -> MemoryEstimate:
        """Of a micro step with the options, but for these."""
        device = self._accelerator.device
        return estimate_memory(self._parts(**changes), micro_batch_size, device, accumulates=accumulation > 1)

    def fits(self, estimate: MemoryEstimate) -> bool:
        return estimate.peak <= SHARE * self.free

    def settle(self) -> None:
        """Makes numbers of the options about the batch, on every process, and says what to set when memory runs out later."""
        options = self._options
        if self._accelerator.device.type == "cpu" and self._accelerator.is_main_process:
            self._warn_of_size()
        if options.global_batch_size:
            resumed = Path(options.output_dir) if options.resume_from_checkpoint else None
            with Bar("measuring the memory of an update", shown=self._accelerator.is_main_process and not options.quiet):
                options.train_batch_size, options.gradient_accumulation_steps = self.split(resumed)
            self._accelerator.gradient_accumulation_steps = options.gradient_accumulation_steps
        explain_out_of_memory(partial(self.explain, options.micro_batch_size, options.gradient_accumulation_steps))

    def _warn_of_size(self) -> None:
        """Of a network made for GPUs, on a CPU."""
        with FakeTensorMode():
            parameters = sum(parameter.numel() for parameter in self._make_network(self._options).parameters())
        if parameters > MOST_ON_CPU:
            height, width = (self._autoencoder.latent_shape if self._autoencoder else self._options.image_shape)[1:]
            preset = None if self._options.pretrained else small_preset(f"{height}x{width}")
            advice = f"; --model_preset {preset} is made for CPUs" if preset else ""
            print(f"warning: {parameters / 1e6:.1f} M parameters on a CPU: an update can take minutes{advice}", flush=True)

    def measures_eagerly(self) -> bool:
        """Whether the updates of reports may run eagerly, which measures activations, without running out of memory. For all
        processes to call."""
        if not self._options.compile:
            return True
        self.free = min(objects_from_all([self.free]))
        options = self._options
        return self.fits(self.estimate(options.micro_batch_size, options.gradient_accumulation_steps))

    def flops_per_image(self) -> int:
        parts = self._parts()
        return flops_per_image(parts.make_network, parts.image_shape)

    def table(self, micro_batch_size: int, accumulation: int) -> str:
        """Returns the estimate in lines to print, with the verdict and, where it does not fit, what to set."""
        estimate = self.estimate(micro_batch_size, accumulation)
        flops = self.flops_per_image()
        rows = (
            ("parameters", estimate.parameters, ""),
            ("buffers", estimate.buffers, ""),
            ("gradients", estimate.gradients, ""),
            ("DDP's buckets", estimate.buckets, "where gradients go when they are reduced"),
            ("optimizer", estimate.optimizer, ""),
            ("EMA", estimate.ema, ""),
            ("activations", estimate.activations, "kept from the forward to the backward pass"),
            ("workspace", estimate.workspace, "of the libraries, an estimate"),
            ("predicted peak", estimate.peak, PEAK),
        )
        lines = [self.asked(micro_batch_size, accumulation)]
        lines += [f"{name:18} {size / MIB:12,.1f} MiB  {note}".rstrip() for name, size, note in rows if size]
        lines.append(f"{'FLOPs per image':18} {flops / 1e9:12,.2f} G    forward and backward pass")
        share = f"{100 * estimate.peak / self.free:.0f} % of the {self.free / GIB:.1f} GiB that are free"
        if self._sharing > 1:
            share += f" to each of {self._sharing} processes"
        if self._untried:
            lines.append("auto: the largest micro batch that is predicted to fit; a run tests it and may use a smaller one")
        if self._options.compile:
            lines.append(
                "--compile: the update of each report runs eagerly and needs that; where it does not fit, activations are not "
                "reported. The others usually need less"
            )
        fits = self.fits(estimate)
        lines.append(f"fits: {share}" if fits else f"does not fit: {share}; {self.advice(micro_batch_size, accumulation)}")
        return "\n".join(lines)

    def show(self, schedule: dict | None = None) -> int:
        """Prints the table, and what the doctor says (`schedule` as in the run's record). Returns the exit status."""
        options = self._options
        batch = options.micro_batch_size, options.gradient_accumulation_steps
        with Bar("predicting the memory of an update", shown=self._accelerator.is_main_process and not options.quiet):
            fits = self.fits(self.estimate(*batch))
            table = self.table(*batch)

        def write() -> None:
            print(table)
            with FakeTensorMode():
                network = self._make_network(options)
                optimizer = self._make_optimizer(network)
            facts = {
                "global_batch_size": (
                    self._accelerator.num_processes * options.micro_batch_size * options.gradient_accumulation_steps
                ),
                "parameters": sum(parameter.numel() for parameter in network.parameters()),
                "optimizer_epsilon": optimizer.param_groups[0].get("eps"),
            }
            size = storage_bytes(network.parameters())
            carried = self._autoencoder.bytes if self._autoencoder else 0
            if options.max_train_steps:  # else their number depends on that of the images
                print(DiskPlan(options, size, options.max_train_steps, autoencoder=carried).line(Path(options.output_dir)))
            warnings = (f"warning: {useless}" for useless in options.without_effect())
            print(*warnings, *foretold(vars(options), facts, schedule), sep="\n")

        on_main_process(self._accelerator, "predicting the memory of an update", write)
        return 0 if from_main_process(fits) else EXIT_DOES_NOT_FIT

    def asked(self, micro_batch_size: int, accumulation: int) -> str:
        device = self._accelerator.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        checkpointing = "on" if self._options.gradient_checkpointing else "off"
        parts, what = self._parts(), "latents" if self._autoencoder else "images"
        return (
            f"{micro_batch_size} {what} of {'x'.join(map(str, parts.image_shape))} in each of {accumulation} micro steps, "
            f"precision {parts.mixed_precision}, gradient checkpointing {checkpointing}, on {name}"
        )

    def advice(self, micro_batch_size: int, accumulation: int) -> str:
        """What to set so that it fits: the same update in more micro steps; where not even one image fits, what needs less."""
        together = micro_batch_size * accumulation
        smaller = [micro for micro in divisors(together) if micro < micro_batch_size]
        micro = largest_that_fits(smaller, lambda size: self.fits(self.estimate(size, together // size)))
        if micro is not None:
            return f"set --train_batch_size {micro} --gradient_accumulation_steps {together // micro}"
        for flags, options in (
            ("--gradient_checkpointing", {"gradient_checkpointing": True}),
            ("--mixed_precision bf16", {"mixed_precision": "bf16"}),
            ("--gradient_checkpointing --mixed_precision bf16", {"gradient_checkpointing": True, "mixed_precision": "bf16"}),
        ):
            if self.fits(self.estimate(1, together, **options)):
                return f"set --train_batch_size 1 --gradient_accumulation_steps {together} {flags}"
        return "not even one image fits: set a smaller network or --resolution"

    def explain(self, micro_batch_size: int, accumulation: int) -> str:
        """Returns what to say when memory has run out: asked, predicted, and what to set."""
        predicted = self.estimate(micro_batch_size, accumulation).peak
        return (
            f"asked: {self.asked(micro_batch_size, accumulation)}\n"
            f"predicted: {predicted / GIB:.2f} GiB, when {self.free / GIB:.2f} GiB were free\n"
            f"{self.advice(micro_batch_size, accumulation)}"
        )

    def split(self, resumed: Path | None = None) -> tuple[int, int]:
        """(micro batch, micro steps) that make up `global_batch_size` exactly, on every process, all of which must call it.

        For a number as `train_batch_size` see `length.split_batch`. With "auto" it is the largest micro batch that fits:
        predicted, then, but for a dry run, tried out by a real update on every process; the next smaller one is taken until
        all succeed. What the run in the folder `resumed` was trained with stays while it is predicted to fit. Raises UserError
        when the global batch cannot be split so, or when not even one image fits.
        """
        num_processes, global_batch_size = self._accelerator.num_processes, cast(int, self._options.global_batch_size)
        if self._options.train_batch_size != "auto":
            return split_batch(self._options, num_processes)
        together = per_process(global_batch_size, num_processes)
        sizes = divisors(together)
        self.free = min(objects_from_all([self.free]))
        largest = largest_that_fits(sizes, lambda size: self.fits(self.estimate(size, together // size)))
        if largest is None:
            raise UserError(f"no --train_batch_size fits into {self.free / GIB:.2f} GiB of memory\n{self.advice(1, together)}")
        recorded = from_main_process(recorded_split(resumed, global_batch_size, num_processes))
        if recorded in sizes and recorded <= largest:
            return recorded, together // recorded
        if self._options.dry_run:
            self._untried = True
            return largest, together // largest
        for size in (size for size in sizes if size <= largest):
            if all(objects_from_all([self._succeeds(size, together // size)])):
                return size, together // size
        raise UserError(f"out of memory with one image at a time\n{self.advice(1, together)}")

    def _succeeds(self, micro_batch_size: int, accumulation: int) -> bool:
        """Whether a real update does not run out of memory. Random numbers are left as they were."""
        device = self._accelerator.device
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
                step = TrialStep(self._parts())
                step.run(micro_batch_size, min(accumulation, 2))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            if not out_of_memory(error):
                raise
            return False
        finally:
            step = None
            gc.collect()
            clear_device_cache()
        return True


def free_memory(device: torch.device, local_processes: int = 1) -> int:
    """Returns the bytes that this process can still get on `device`: on a CPU an even share of what is left for all
    `local_processes` on this machine; a GPU is taken to be this process's alone."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_ram() // local_processes


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Returns the largest of falling `sizes` that `fits`, where all smaller ones do too; None when none does."""
    place = bisect_left(sizes, True, key=fits)
    return sizes[place] if place < len(sizes) else None


def recorded_split(output_dir: Path | None, global_batch_size: int, num_processes: int) -> int | None:
    """Returns the micro batch of the run in `output_dir`, if that had as many processes and as large an update; else None."""
    resolved = read_json(output_dir / "options.json").get("resolved", {}) if output_dir else {}
    same = (resolved.get("global_batch_size"), resolved.get("num_processes")) == (global_batch_size, num_processes)
    return resolved.get("micro_batch_size") if same else None
