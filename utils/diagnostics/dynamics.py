"""Magnitudes inside the network over a run: activations, weights, gradients and updates, layer by layer.

Drifting magnitudes are how a training goes wrong before its loss shows it (Karras et al. 2024, section 2.1). They are measured
on one update in every so many, as root mean squares; all of them reach the host in a single transfer.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from utils.optim.clipping import Gradients

MEASURED = (nn.Conv2d, nn.Linear)  # layers whose outputs are watched
SEEN = ("data/min", "data/max", "data/mean", "data/std")


class Dynamics:
    """Measures an update from `begin`, before its forward pass, over `before_step` to `end`, after the optimizer's step.

    `report` gives what was measured, once. Between `end` and the next `begin` nothing costs anything.

    Args:
        eager: whether updates that are measured run eagerly where the network is compiled. Where they do not, compiled code
            calls no hooks, and activations are not measured.
    """

    def __init__(self, model: nn.Module, eager: bool = True):
        self.eager = eager
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Frozen ones are shown as without gradient; the random frequencies of a Fourier time embedding are meant to be.
        frozen = (name for name, p in model.named_parameters() if not p.requires_grad)
        self._frozen = [name for name in frozen if not name.removeprefix("unet.").startswith("time_proj.")]
        device = next(model.parameters()).device
        self._sizes = torch.tensor([float(p.numel()) for p in self._parameters.values()], device=device)
        self._layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MEASURED)]
        self._hooks = ExitStack()
        self._activations: dict[str, list[torch.Tensor]] = {}
        self._images: list[torch.Tensor] = []
        self._before: list[torch.Tensor] | None = None
        self._measured: torch.Tensor | None = None
        self._watching = False

    def begin(self, wanted: bool) -> None:
        """If `wanted`, watches every forward pass until `before_step`; these run eagerly."""
        if not wanted:
            return
        self._watching, self._activations, self._images = True, {}, []
        if not self.eager:
            return
        for name, module in self._layers:
            self._hooks.callback(module.register_forward_hook(self._watch(name)).remove)
        self._hooks.enter_context(torch.compiler.set_stance("force_eager"))

    def _watch(self, name: str) -> Callable[[nn.Module, tuple, torch.Tensor], None]:
        def look(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            square = output.detach().float().square().mean()
            self._activations.setdefault(name, []).append(square)

        return look

    def see_images(self, clean_images: torch.Tensor) -> None:
        """Notes what the network is trained on: range, mean and variance of [B, C, H, W]."""
        if self._watching:
            variance, mean = torch.var_mean(clean_images.float(), correction=0)
            count = torch.full_like(mean, clean_images.numel())
            self._images.append(torch.stack([*clean_images.float().aminmax(), mean, variance, count]))

    def before_step(self) -> None:
        """Keeps the weights for the size of the update: one copy of them, until `end`."""
        if not self._watching:
            return
        self._watching = False
        self._hooks.close()
        self._before = [p.detach().clone() for p in self._parameters.values()]

    def end(self, gradients: Gradients) -> None:
        """Takes the measures; nothing waits for the device."""
        if self._before is None:
            return
        weights = torch.stack(torch._foreach_norm([p.detach() for p in self._parameters.values()]))
        torch._foreach_sub_(self._before, [p.detach() for p in self._parameters.values()])
        updates = torch.stack(torch._foreach_norm(self._before))
        self._before = None
        sizes = self._sizes.sqrt()
        squares = [torch.stack(values).mean() for values in self._activations.values()]
        activations = torch.stack(squares).sqrt() if squares else weights.new_zeros(0)
        ratios = updates / weights.clamp(min=1e-12)
        least, most, means, variances, counts = torch.stack(self._images).T
        mean = (counts * means).sum() / counts.sum()  # of all micro steps together, as the variance: within them and between
        variance = (counts * (variances + (means - mean).square())).sum() / (counts.sum() - 1)
        images = torch.stack([least.min(), most.max(), mean, variance.sqrt()])
        self._measured = torch.cat([images, weights / sizes, gradients.norms / sizes, ratios, activations])

    def measured(self) -> torch.Tensor:
        """Returns what a report is made of, on the device; empty where no update was measured."""
        return self._sizes.new_zeros(0) if self._measured is None else self._measured

    def report(self, values: list[float] | None = None) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """(figures to log, magnitudes by layer) of the update that was measured; empty where none was. `values` are those of
        `measured`, where they were read along with others; else the host waits for the device.

        The layers: name of each parameter -> {"weight", "gradient": rms, "update": change over weight}, and "activation":
        rms of its layer's output where it is a layer's weight. The figures: data/min, max, mean, std of this process's
        images; the largest and the smallest gradient by layer, and how many parameters get none.
        """
        if self._measured is None:
            return {}, {}
        measured, self._measured = self._measured.tolist() if values is None else values, None
        seen, values = measured[: len(SEEN)], measured[len(SEEN) :]
        count = len(self._parameters)
        names = list(self._parameters)
        columns = zip(values[:count], values[count : 2 * count], values[2 * count : 3 * count])
        layers = {
            name: {"weight": weight, "gradient": gradient, "update": update}
            for name, (weight, gradient, update) in zip(names, columns)
        }
        layers |= {name: {"gradient": 0.0} for name in self._frozen}
        for name, value in zip(self._activations, values[3 * count :]):
            layers.setdefault(f"{name}.weight", {})["activation"] = value
        gradients = values[count : 2 * count]
        figures = dict(zip(SEEN, seen)) | {"gradients/largest_rms": max(gradients), "gradients/smallest_rms": min(gradients)}
        figures["gradients/parameters_without"] = sum(gradient == 0.0 for gradient in gradients) + len(self._frozen)
        return figures, layers
