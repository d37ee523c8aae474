"""What was wrong with an update that was skipped because its loss or gradient is not finite: which sample, module, weights."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from utils.core.distributed import objects_from_all, on_main_process
from utils.core.files import whole_file, write_json
from utils.core.images import make_grid, save_png
from utils.data.autoencoder import Autoencoder
from utils.diffusion.sampling import to_uint8
from utils.optim.nonfinite import BadUpdate, advice
from utils.runs.history import to_json
from utils.training.run import Run

MAX_REPORTS = 5  # per start of a run: the first ones tell, and a disk is not filled with the rest
MAX_NAMES = 30  # parameters named in a report


@torch.no_grad()  # or gradient checkpointing would count what isfinite keeps for a backward pass
def finite(value: object) -> bool:
    """Returns whether every floating tensor in `value` (a tensor, or a module's output of them) is finite."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    return all(map(finite, value)) if isinstance(value, (tuple, list)) else True


def find_first_bad_module(unet: nn.Module, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict | None]:
    """(what `compute()` gives, {"name", "class", "inputs_finite"} of the network's first module that then gives values that
    are not finite, or None). Where its inputs are finite, the trouble began there."""
    found = None

    def watch(name: str) -> Callable[[nn.Module, tuple, object], None]:
        def look(module: nn.Module, inputs: tuple, output: object) -> None:
            nonlocal found
            if found is None and not finite(output):
                found = {"name": name, "class": type(module).__name__, "inputs_finite": finite(inputs)}

        return look

    with ExitStack() as hooks:
        for name, module in unet.named_modules():  # a part's hook runs before that of the whole
            hooks.callback(module.register_forward_hook(watch(name or "the network")).remove)
        hooks.enter_context(torch.compiler.set_stance("force_eager"))  # hooks are not called inside compiled code
        return compute(), found


class NanReports:
    """Writes nan_report/ of the first skipped updates. Their batches are made again, as functions of the sample numbers."""

    def __init__(self, run: Run):
        self._run, self._network = run, run.objective.network
        self._written = 0

    def write(self, bad: BadUpdate, done: int, learning_rate: float) -> None:
        """Writes nan_report/update-<N>/ and says in a line what was found, up to MAX_REPORTS times. Call it on all ranks.

        report.json names the samples, their noise levels and losses, the parameters whose gradient was not finite, and the
        first module whose output is not finite when the update is computed again, with the weights after `done` updates;
        rank<r>.safetensors and rank<r>.png hold the batch. Whatever goes wrong on the way, a full disk or memory, becomes part
        of the line; the training goes on.
        """
        if self._written == MAX_REPORTS:
            return
        self._written += 1
        run = self._run
        folder = run.output_dir / "nan_report" / f"update-{bad.step + 1}"
        names = [name for name, p in self._network.named_parameters() if p.requires_grad]
        bad_names = [name for name, ok in zip(names, torch.isfinite(bad.norms).tolist()) if not ok]
        replay: dict = {"rank": run.accelerator.process_index, "first_bad_module": None, "bad_gradients": []}
        samples: list[dict] = []
        problem = None
        buffers = [buffer.clone() for buffer in self._network.buffers()]
        try:
            self._compute_again(bad, folder, replay, samples)
        except Exception as error:  # on this rank alone: the others wait in the gathers below
            problem = f"its report is not complete ({type(error).__name__}: {str(error)[:200]})"
        finally:
            for buffer, before in zip(self._network.buffers(), buffers):  # spectral normalization moves its own
                buffer.copy_(before)
        samples, replays, problems = (objects_from_all(own) for own in (samples, [replay], [problem]))
        blamed = next((r["first_bad_module"] for r in replays if r["first_bad_module"]), None)
        suspects = [s for s in samples if isinstance(s["loss"], str)]
        suspects = suspects or [s for s in samples if isinstance(s["loss_again"], str)]
        report = {
            "skipped_update": bad.step + 1,
            "updates_done_when_computed_again": done,
            "learning_rate": learning_rate,
            **run.facts,
            "first_bad_module": blamed,
            "bad_gradients": {"count": len(bad_names), "of": len(names), "names": bad_names[:MAX_NAMES]},
            "bad_samples": suspects,
            "computed_again": replays,
            "what_to_try": advice(run.accelerator.mixed_precision),
            "samples": samples,
        }

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "report.json", report)

        on_main_process(run.accelerator, "writing nan_report", write)
        where = next(filter(None, problems), None) or folder.relative_to(run.output_dir)
        summary = _summary(blamed, suspects, bad_names, replays, run.objective.level.removesuffix("s"))
        run.print_line(f"update {bad.step + 1} skipped, {summary}: {where}")

    def _compute_again(self, bad: BadUpdate, folder: Path, replay: dict, samples: list[dict]) -> None:
        """Fills `replay` and `samples` with what this rank finds, and writes its batch. One micro step's memory at a time."""
        parameters = {name: p for name, p in self._network.named_parameters() if p.requires_grad}
        rank, kept = replay["rank"], []
        samples_of_run, objective = self._run.data.samples, self._run.objective
        for micro_step, loaded in enumerate(samples_of_run.batches(bad.step, bad.step + 1)):
            batch = objective.draw(samples_of_run.on_device(loaded))
            numbers = loaded["sample_numbers"]
            rows = samples_of_run.dataset_rows(numbers)
            size = len(numbers)
            losses = bad.losses[micro_step * size : (micro_step + 1) * size]
            tensors = {"sample_numbers": numbers, "dataset_rows": rows, **batch}
            kept.append({name: tensor.cpu() for name, tensor in tensors.items()})

            def compute(micro_step: int = micro_step, batch: dict = batch) -> torch.Tensor:
                samples_of_run.seed_dropout(bad.step, micro_step)
                return objective.losses(self._network, **batch).trained

            again, module = find_first_bad_module(self._network, compute)
            replay["first_bad_module"] = replay["first_bad_module"] or module
            columns = {
                "sample_number": numbers.tolist(),
                "dataset_row": rows.tolist(),
                objective.level.removesuffix("s"): batch[objective.level].tolist(),
                "rank": [rank] * size,
                "loss": to_json(losses.tolist()),
                "loss_again": to_json(again.tolist()),
                "image_finite": torch.isfinite(batch["clean_images"]).flatten(1).all(1).tolist(),
            }
            samples += [dict(zip(columns, row)) for row in zip(*columns.values())]
            # Not .backward(), in which DDP would take part.
            gradients = torch.autograd.grad(again.mean(), list(parameters.values()), allow_unused=True)
            found = {name for name, g in zip(parameters, gradients) if g is not None and not finite(g)}
            found.update(replay["bad_gradients"])
            replay["bad_gradients"] = [name for name in parameters if name in found][:MAX_NAMES]
        autoencoder = self._run.data.autoencoder
        _write_batch(folder, rank, {name: torch.cat([batch[name] for batch in kept]) for name in kept[0]}, autoencoder)


def _summary(module: dict | None, samples: list[dict], bad_names: list[str], replays: list[dict], level: str) -> str:
    if samples and not samples[0]["image_finite"]:
        return f"the image of sample {samples[0]['sample_number']} (row {samples[0]['dataset_row']}) is not finite"
    if module is not None:
        of = f" for sample {samples[0]['sample_number']} ({level} {samples[0][level]})" if samples else ""
        return f"{module['name']} ({module['class']}) gave values that are not finite{of}"
    if samples:
        sample = samples[0]
        again = "" if isinstance(sample["loss_again"], str) else ", though not when computed again"
        return f"the loss of sample {sample['sample_number']} ({level} {sample[level]}) was {sample['loss']}{again}"
    again = "" if any(r["bad_gradients"] for r in replays) else ", though not when computed again"
    return f"the gradient of {bad_names[-1] if bad_names else 'all parameters together'} was not finite{again}"


def _write_batch(folder: Path, rank: int, tensors: dict[str, torch.Tensor], autoencoder: Autoencoder | None) -> None:
    """A rank's samples as safetensors and as a picture; `autoencoder`: by which latents are decoded."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / f"rank{rank}.safetensors") as draft:
        draft.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    images = tensors["clean_images"] if autoencoder is None else autoencoder.decode(tensors["clean_images"])
    save_png(make_grid(to_uint8(images)), folder / f"rank{rank}.png")
