"""Updates whose loss or gradient is not finite: counted on the device, told apart from a GradScaler's own skips, explained.

Such an update changes nothing (see `optimization.step_if_finite`). What it trained on need not be kept to be shown later: every
image, timestep and noise is a function of its sample number, so a report computes the batch again.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save
from torch import nn

from utils.gradients import Gradients
from utils.images import make_grid, save_png
from utils.launch import on_main_process
from utils.sampling import to_uint8

MAX_REPORTS = 5  # per start of a run: the first ones tell, and a disk is not filled with the rest
MAX_NAMES = 30  # parameters named in a report
ADVICE = "try a lower --learning_rate, a longer --lr_warmup_steps, a smaller --max_grad_norm, bf16 in place of fp16"


class BadUpdate(NamedTuple):
    """The first skipped update since the last report, as it was seen when it happened."""

    step: int  # updates finished before it
    losses: torch.Tensor  # [micro steps x batch], of this rank's samples
    norms: torch.Tensor  # [P], gradient norm of each parameter, averaged over the ranks before


def spread_to_gradient(loss: torch.Tensor) -> torch.Tensor:
    """`loss`, but with a gradient that is not finite where it is not: inf minus a number, say, has a finite one.

    The gradient is what all ranks share and what decides on an update.
    """
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


class BadUpdates:
    """Counts updates with a gradient that is not finite, and keeps the first since the last report; no host sync.

    Under a GradScaler (fp16) a gradient that overflows while every loss is finite and the scale can still fall is the scaler
    finding its scale: counted apart, and neither part of a row of bad updates nor the end of one.
    """

    def __init__(self, accelerator: Accelerator, num_parameters: int, skipped: int = 0, scaler_skips: int = 0, row: int = 0):
        device = accelerator.device
        self._accelerator = accelerator
        self._micro_losses: list[torch.Tensor] = []
        self._counts = torch.tensor([skipped, scaler_skips], device=device)
        self._in_a_row = torch.tensor(row, device=device)
        self._most_in_a_row = torch.tensor(0, device=device)
        self._first_step = torch.tensor(-1, device=device)
        self._first_norms = torch.zeros(num_parameters, device=device)
        self._first_losses: torch.Tensor | None = None
        self.first: BadUpdate | None = None
        self.row = row  # bad updates up to the newest that was reported, without a good one between

    def add_losses(self, losses: torch.Tensor) -> None:
        """Notes the losses [B] of one micro step."""
        self._micro_losses.append(losses.detach())

    @torch.no_grad()
    def add(self, step: int, gradients: Gradients) -> None:
        """Judges the update that follows `step` finished ones, whose micro steps were noted; before the optimizer's step."""
        losses = torch.cat(self._micro_losses)
        self._micro_losses.clear()
        bad, overflow = ~gradients.finite, torch.zeros_like(gradients.finite)
        if gradients.loss_scale is not None:
            broken = (~torch.isfinite(losses).all()).float()
            if self._accelerator.num_processes > 1:  # averaged gradients do not tell a NaN of another rank from an overflow
                broken = self._accelerator.reduce(broken, "sum")
            overflow = bad & (broken == 0) & (gradients.loss_scale > 1)
            bad = bad & ~overflow
        self._counts += torch.stack([bad, overflow])
        self._in_a_row = (self._in_a_row + bad) * (bad | overflow)
        self._most_in_a_row = torch.maximum(self._most_in_a_row, self._in_a_row)
        first = bad & (self._first_step < 0)
        self._first_step = torch.where(first, step, self._first_step)
        self._first_norms = torch.where(first, gradients.norms, self._first_norms)
        kept = torch.zeros_like(losses) if self._first_losses is None else self._first_losses
        self._first_losses = torch.where(first, losses, kept)

    def report(self) -> dict[str, float]:
        """Counts since the run began and the longest row since the last report; sets `first`. The host waits for the device."""
        figures = torch.stack([self._first_step, *self._counts, self._most_in_a_row, self._in_a_row])
        step, *counts, most, self.row = figures.tolist()
        self.first = None
        if step >= 0:
            self.first = BadUpdate(step, self._first_losses.clone(), self._first_norms.clone())
            self._first_step.fill_(-1)
        self._most_in_a_row = self._in_a_row.clone()
        report = {"train/skipped_updates": counts[0], "train/bad_updates_in_a_row": most}
        return report | ({"train/scaler_skips": counts[1]} if self._accelerator.scaler is not None else {})

    def totals(self) -> tuple[int, int, int]:
        """(skipped updates, the scaler's skips) since the run began, and the row now. The host waits for the device."""
        return tuple(torch.stack([*self._counts, self._in_a_row]).tolist())


@torch.no_grad()  # or gradient checkpointing would count what isfinite keeps for a backward pass
def finite(value) -> bool:
    """Whether every floating tensor in `value` (a tensor, or a module's output of them) is finite."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    return all(map(finite, value)) if isinstance(value, (tuple, list)) else True


def find_first_bad_module(unet: nn.Module, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict | None]:
    """(what `compute()` gives, the first of the network's modules that it makes give values that are not finite, or None).

    The module is {"name", "class", "inputs_finite"}; where its inputs are finite, it is where the trouble began.
    """
    found = None

    def watch(name: str):
        def look(module, inputs, output):
            nonlocal found
            if found is None and not finite(output):
                found = {"name": name, "class": type(module).__name__, "inputs_finite": finite(inputs)}

        return look

    with ExitStack() as hooks:
        for name, module in unet.named_modules():  # a part's hook runs before that of the whole
            hooks.callback(module.register_forward_hook(watch(name or "the network")).remove)
        hooks.enter_context(torch.compiler.set_stance("force_eager"))  # hooks are not called inside compiled code
        return compute(), found


def write_nan_report(
    accelerator: Accelerator,
    output_dir: Path,
    bad: BadUpdate,
    unet: nn.Module,
    micro_batches: Iterator[dict[str, torch.Tensor]],
    losses_of: Callable[..., torch.Tensor],
    facts: dict,
) -> str:
    """Writes nan_report/update-<N>/ of the skipped update and says in a line what was found. Call it on all ranks.

    report.json names the samples, their timesteps and losses, the parameters whose gradient was not finite, and the first
    module whose output is not finite when the update is computed again; rank<r>.safetensors and rank<r>.png hold the batch.
    Whatever goes wrong on the way, a full disk or memory, becomes part of the line; the training goes on.

    Args:
        unet: unwrapped, with the weights of now; its gradients and buffers are left alone.
        micro_batches: of this rank; each `sample_numbers`, `dataset_rows` and `timesteps` int64 [B], `clean_images` and
            `noise` float32 [B, C, H, W].
        losses_of: gives the losses [B] of micro step i by `losses_of(i, **micro_batches[i])`.
        facts: more to record, such as the learning rate.
    """
    folder = output_dir / "nan_report" / f"update-{bad.step + 1}"
    names = [name for name, p in unet.named_parameters() if p.requires_grad]
    bad_names = [name for name, ok in zip(names, torch.isfinite(bad.norms).tolist()) if not ok]
    replay: dict = {"rank": accelerator.process_index, "first_bad_module": None, "bad_gradients": []}
    samples: list[dict] = []
    problem = None
    buffers = [buffer.clone() for buffer in unet.buffers()]
    try:
        _compute_again(bad, unet, micro_batches, losses_of, folder, replay, samples)
    except Exception as error:  # on this rank alone: the others wait in the gathers below
        problem = f"its report is not complete ({type(error).__name__}: {str(error)[:200]})"
    finally:
        for buffer, before in zip(unet.buffers(), buffers):  # spectral normalisation moves its own in every forward pass
            buffer.copy_(before)
    samples, replays, problems = gather_object(samples), gather_object([replay]), gather_object([problem])
    blamed = next((r["first_bad_module"] for r in replays if r["first_bad_module"]), None)
    suspects = [s for s in samples if isinstance(s["loss"], str)] or [s for s in samples if isinstance(s["loss_again"], str)]
    report = {
        "skipped_update": bad.step + 1,
        **facts,
        "first_bad_module": blamed,
        "bad_gradients": {"count": len(bad_names), "of": len(names), "names": bad_names[:MAX_NAMES]},
        "bad_samples": suspects,
        "computed_again": replays,
        "what_to_try": ADVICE,
        "samples": samples,
    }

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report, indent=2))

    on_main_process(accelerator, write)
    where = next(filter(None, problems), None) or folder.relative_to(output_dir)
    return f"update {bad.step + 1} skipped, {_summary(blamed, suspects, bad_names, replays)}: {where}"


def _compute_again(bad: BadUpdate, unet, micro_batches, losses_of, folder: Path, replay: dict, samples: list[dict]) -> None:
    """Fills `replay` and `samples` with what this rank finds, and writes its batch. One micro step's memory at a time."""
    parameters = {name: p for name, p in unet.named_parameters() if p.requires_grad}
    rank, kept = replay["rank"], []
    for micro_step, batch in enumerate(micro_batches):
        size = len(batch["timesteps"])
        losses = bad.losses[micro_step * size : (micro_step + 1) * size]
        kept.append({name: tensor.cpu() for name, tensor in batch.items()})
        again, module = find_first_bad_module(unet, lambda: losses_of(micro_step, **batch))  # noqa: B023 - called at once
        replay["first_bad_module"] = replay["first_bad_module"] or module
        columns = {
            "sample_number": batch["sample_numbers"].tolist(),
            "dataset_row": batch["dataset_rows"].tolist(),
            "timestep": batch["timesteps"].tolist(),
            "rank": [rank] * size,
            "loss": [_number(loss) for loss in losses.tolist()],
            "loss_again": [_number(loss) for loss in again.tolist()],
            "image_finite": torch.isfinite(batch["clean_images"]).flatten(1).all(1).tolist(),
        }
        samples += [dict(zip(columns, row)) for row in zip(*columns.values())]
        # Not .backward(), in which DDP would take part.
        gradients = torch.autograd.grad(again.mean(), parameters.values(), allow_unused=True)
        found = {name for name, g in zip(parameters, gradients) if g is not None and not finite(g)}
        replay["bad_gradients"] = [name for name in parameters if name in found or name in replay["bad_gradients"]][:MAX_NAMES]
    _write_batch(folder, rank, {name: torch.cat([batch[name] for batch in kept]) for name in kept[0]})


def _summary(module: dict | None, samples: list[dict], bad_names: list[str], replays: list[dict]) -> str:
    if samples and not samples[0]["image_finite"]:
        return f"the image of sample {samples[0]['sample_number']} (row {samples[0]['dataset_row']}) is not finite"
    if module is not None:
        of = f" for sample {samples[0]['sample_number']} (timestep {samples[0]['timestep']})" if samples else ""
        return f"{module['name']} ({module['class']}) gave values that are not finite{of}"
    if samples:
        sample = samples[0]
        again = "" if isinstance(sample["loss_again"], str) else ", though not when computed again"
        return f"the loss of sample {sample['sample_number']} (timestep {sample['timestep']}) was {sample['loss']}{again}"
    again = "" if any(r["bad_gradients"] for r in replays) else ", though not when computed again"
    return f"the gradient of {bad_names[-1] if bad_names else 'all parameters together'} was not finite{again}"


def _write_batch(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """A rank's samples as safetensors and as a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".rank{rank}.tmp"
    temporary.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    os.replace(temporary, folder / f"rank{rank}.safetensors")
    save_png(make_grid(to_uint8(tensors["clean_images"])), folder / f"rank{rank}.png")


def _number(value: float) -> float | str:
    return value if -float("inf") < value < float("inf") else str(value)  # JSON has no NaN
