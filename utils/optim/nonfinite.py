"""Updates whose loss or gradient is not finite: counted on the device, and told apart from a GradScaler's own skips.

Such an update changes nothing (`step_if_finite`); `nan_report` explains it.
"""

from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from utils.optim.clipping import Gradients


def advice(mixed_precision: str) -> str:
    """Returns what to try against updates that are not finite, in a run of that precision."""
    general = "try a lower --learning_rate, a longer --lr_warmup_steps, a smaller --max_grad_norm"
    return general + (", bf16 in place of fp16" if mixed_precision == "fp16" else "")


class BadUpdate(NamedTuple):
    """The first skipped update since the last report, as it was seen when it happened."""

    step: int  # updates finished before it
    losses: torch.Tensor  # [micro steps x batch], of this rank's samples
    norms: torch.Tensor  # [P], gradient norm of each parameter, averaged over the ranks before


def propagate_nonfinite(loss: torch.Tensor) -> torch.Tensor:
    """`loss`, but with a gradient that is not finite where it is not: inf minus a number, say, has a finite one.

    The gradient is what all ranks share and what decides on an update.
    """
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def step_if_finite(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """One optimizer update, or none at all where `finite` (0-dim bool on the device) is false.

    Fused optimizers (AdamW, Adam) take the decision on the device, through the `found_inf` protocol that torch's
    GradScaler uses, so the host does not wait. For others, and on a CPU, the host reads the flag. With a GradScaler (fp16)
    the scaler skips by itself, on the same condition, because the gradients were unscaled when their norm was taken.
    """
    scaler = getattr(optimizer, "scaler", None)
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    if scaler is not None and scaler.is_enabled():
        optimizer.step()
    elif not on_cpu(finite) and getattr(inner, "_step_supports_amp_scaling", False):
        inner.found_inf = (~finite).float()
        inner.step()  # Accelerate's wrapper has nothing to add here, and takes its time
    elif finite.item():
        inner.step()


def on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


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
        self._first_losses: Any = None  # a tensor from the first update on
        self.first: BadUpdate | None = None
        self.row = row  # bad updates up to the newest that was reported, without a good one between

    def add_losses(self, losses: torch.Tensor) -> None:
        """Notes the losses [B] of one micro step."""
        self._micro_losses.append(losses.detach())

    def add(self, step: int, gradients: Gradients) -> None:
        """Judges the update that follows `step` finished ones, whose micro steps were noted; before the optimizer's step."""
        losses, self._micro_losses = self._micro_losses, []
        if on_cpu(gradients.finite) and gradients.finite:  # the flag is at hand, and what follows would change nothing else
            self._in_a_row.zero_()
        else:
            self._judge(step, gradients, torch.cat(losses))

    @torch.no_grad()
    def _judge(self, step: int, gradients: Gradients, losses: torch.Tensor) -> None:
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

    def counts(self) -> torch.Tensor:
        """Returns what a report is made of, on the device."""
        return torch.stack([self._first_step, *self._counts, self._most_in_a_row, self._in_a_row])

    def report(self, values: list[int] | None = None) -> dict[str, float]:
        """Counts since the run began, the longest row since the last report, and the number of the first bad update since then,
        where there was one; sets `first`. `values` are those of `counts`, where they were read along with others; else the
        host waits for the device."""
        step, *counts, most, self.row = self.counts().tolist() if values is None else values
        self.first = None
        if step >= 0:
            self.first = BadUpdate(step, self._first_losses.clone(), self._first_norms.clone())
            self._first_step.fill_(-1)
        self._most_in_a_row = self._in_a_row.clone()
        report = {"train/skipped_updates": counts[0], "train/bad_updates_in_a_row": most}
        if step >= 0:
            report["train/first_skipped_update"] = step + 1
        return report | ({"train/scaler_skips": counts[1]} if self._accelerator.scaler is not None else {})

    def totals(self) -> tuple[int, int, int]:
        """(skipped updates, the scaler's skips) since the run began, and the row now. The host waits for the device."""
        return tuple(torch.stack([*self._counts, self._in_a_row]).tolist())
