"""The loss as its gradient with respect to the network's output shows it: the error, what it is an error of, what it counts."""

from dataclasses import dataclass

import torch

from utils.diagnostics.audit.fitting import fit, gather, middle, named, simple
from utils.diagnostics.audit.seen import Call

NO_GRADIENT = "the loss has no gradient with respect to the output"


@dataclass(frozen=True)
class Loss:
    """What was seen of an update's loss, which is declared to be a mean over pixels, batch and micro steps."""

    output: torch.Tensor  # of the network, [B, N]
    gradient: torch.Tensor  # of the loss with respect to it, [B, N]
    pixels: int  # values of an image
    sizes: torch.Tensor  # [B], of each sample's batch
    micro_steps: int
    precision: float  # of the output's dtype

    @property
    def used(self) -> torch.Tensor:
        """Which samples have a gradient, bool [B]."""
        return self.gradient.norm(dim=1) > 0

    def compared_with(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what each sample's mean squared error of `target` counts in the declared mean, [B]; what is left of the gradient of
        those that have one, as a share). The gradient of a squared error is c (output - target)."""
        scale, residual = fit(self.gradient[self.used], (self.output - target)[self.used])
        counts = torch.zeros(len(self.gradient), dtype=torch.float64, device=self.gradient.device)
        counts[self.used] = scale[:, 0]
        return counts * self.pixels * self.sizes * self.micro_steps / 2, residual

    def agreement(self, target: torch.Tensor) -> float:
        """Of the signs of the gradient and of the output's difference from `target`: 1 for any error of them."""
        return float((torch.sign(self.gradient) * torch.sign(self.output - target))[self.used].mean())

    def other_error(self, target: torch.Tensor, of: str = "") -> str:
        """What error of `target` it is, where it is not the squared one."""
        size, difference = self.gradient[self.used].abs(), (self.output - target)[self.used].abs()
        flat_share = float((size > 0.999 * size.amax(1, keepdim=True)).double().mean())
        if flat_share > 0.9:
            return f"the loss is the absolute error (L1){of}, not the squared one"
        if flat_share > 0.01:
            return f"the loss is a Huber (smooth L1) error{of}: large errors count less than their square"
        power, _ = fit(size.clamp(min=1e-30).log(), difference.clamp(min=1e-30).log(), torch.ones_like(size))
        return f"the loss is not a squared error{of}: its gradient grows as the error to the power {middle(power[:, 0]):.2g}"

    def explain_factor(self, factor: float) -> str:
        """Why the whole loss may be `factor` times the declared mean."""
        batch = int(self.sizes[0])
        causes = {
            "its sign is wrong: the loss is maximized": -1.0,
            "it is summed over the pixels, not averaged": float(self.pixels),
            "it is summed over the batch, not averaged": float(batch),
            "it is summed over pixels and batch, not averaged": float(self.pixels * batch),
            "it is not divided by the number of micro steps": float(self.micro_steps),
            "it is divided by the number of micro steps twice": 1.0 / self.micro_steps,
            "it is divided by the batch size twice": 1.0 / batch,
        }
        cause = named(factor, {text: value for text, value in causes.items() if value != 1.0}, 0.0, share=2e-3)
        times = f"the loss is {simple(factor)} times the declared mean"
        return f"{times}: {cause}" if cause else f"{times} over pixels, batch and micro steps"


def seen_loss(calls: list[Call], micro_steps: int, loss_scale: float) -> Loss | str:
    """The `Loss` of these calls of a network, by its first output; a text says why it was not observed."""
    if any(0 not in call.gradients for call in calls):
        return "no gradient reached the output"
    outputs = [call.outputs[0] for call in calls]
    gradient = gather(call.gradients[0] for call in calls) / loss_scale
    if not torch.isfinite(gradient).all():
        return "the gradient is not finite"
    sizes = torch.cat([torch.full((len(output),), float(len(output))) for output in outputs]).to(gradient)
    precision = float(torch.finfo(outputs[0].dtype).eps)
    return Loss(gather(outputs), gradient, outputs[0][0].numel(), sizes, micro_steps, precision)
