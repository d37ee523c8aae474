"""A look at a network before its first update: which modules it is made of, what reaches them, and what they are good for.

Figures only, no verdicts. One forward and one backward pass of two images; weights, modes and random numbers stay as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import torch
from diffusers import ModelMixin
from torch import nn
from torch.nn.utils import parametrize

from utils.core import randomness
from utils.core.errors import one_line
from utils.data.training_data import Batch, TrainingSamples
from utils.diffusion.objective import Objective
from utils.diffusion.sampling import full_precision

LEVELS = torch.tensor([0.3, 0.6], dtype=torch.float64)  # shares of the training's noise levels below those of the images
# On a CPU, parameters x pixels above which nothing is computed: about a second on one core (10 M parameters at 32x32).
LARGEST_ON_CPU = 1e10
MAX_SWITCHED_OFF = 8  # layers, one more forward pass each
TIME_FEATURES = ("time_proj", "noise_features")  # of diffusers' networks and of EDM2's

Forward = Callable[[Callable], torch.Tensor]  # a network, or what stands for it -> the losses of the images


def examine(objective: Objective, samples: TrainingSamples) -> dict:
    """`examine_modules`, and `examine_flow` where that is quick; {"failed"} says why a look failed, which ends no run."""
    found = examine_modules(objective.exported)
    try:
        if affordable(objective.exported, samples.shape[-1] * samples.shape[-2]):
            batch = samples.on_device(next(samples.batches(0, 1)), as_they_are=True)
            count = min(len(LEVELS), len(batch.clean_images))
            labels = None if batch.labels is None else batch.labels[:count]
            few = Batch(batch.sample_numbers[:count], batch.clean_images[:count], batch.noise[:count], labels)
            drawn = objective.draw(few, LEVELS[:count])

            def losses(network: Callable) -> torch.Tensor:
                return objective.losses(cast(nn.Module, network), **drawn).shown

            found |= examine_flow(objective.network, objective.exported, losses)
    except Exception as error:  # out of memory, or a network that bears no hooks
        found["failed"] = one_line(error)
    return found


def examine_modules(network: nn.Module) -> dict:
    """What `network` (a UNet2DModel or EDM2UNet) is made of:

    batch_norms: modules that normalize over the batch; dropout: the largest probability; spectral_norm: whether a layer has
    it; attention: number of modules that attend; attention_declared: whether its config asks for any.
    """
    modules = dict(network.named_modules())
    config = dict(getattr(network, "config", {}))
    blocks = [*(config.get("down_block_types") or ()), *(config.get("up_block_types") or ())]
    return {
        "batch_norms": [name for name, module in modules.items() if isinstance(module, nn.modules.batchnorm._BatchNorm)],
        "dropout": max((float(module.p) for module in modules.values() if isinstance(module, nn.Dropout)), default=0.0),
        "spectral_norm": any(parametrize.is_parametrized(module) for module in modules.values()),
        "attention": sum("Attention" in type(module).__name__ for module in modules.values()),
        "attention_declared": any("Attn" in block for block in blocks),
    }


def affordable(network: nn.Module, pixels: int) -> bool:
    """Whether a pass of images of so many pixels is quick enough to be made before a run."""
    parameters = list(network.parameters())
    return parameters[0].device.type != "cpu" or sum(parameter.numel() for parameter in parameters) * pixels <= LARGEST_ON_CPU


def examine_flow(network: nn.Module, exported: ModelMixin, losses: Forward) -> dict:
    """What passes through `exported`, the part of `network` that makes images, when `losses` of a few images are computed:

    zero_inputs: layer -> share of its input's channels that are exactly zero in all images, where that is not 0; not behind
        ReLU.
    idle: layers of which neither output nor gradient depends on them: not called, or replaced by zeros without a change.
    cut: layers that change the output, but get no gradient.
    told, received: mean noise level that the network gets, and that its time embedding gets; None where there is none.

    Weights that are zero have random ones in their place meanwhile: before the first update they would hide what is before
    them.
    """
    layers: dict[str, nn.Module] = {
        name: module for name, module in exported.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))
    }
    norms: dict[str, nn.Module] = {
        name: module for name, module in exported.named_modules() if isinstance(module, nn.GroupNorm)
    }
    seen = _Seen()
    numbers = torch.ones(1, dtype=torch.int64, device=next(exported.parameters()).device)
    with full_precision(network), ExitStack() as restored:
        if exported.is_gradient_checkpointing:  # outputs of layers are no part of the graph then
            exported.disable_gradient_checkpointing()
            restored.callback(exported.enable_gradient_checkpointing)
        zeros = {name: parameter for name, parameter in network.named_parameters() if not parameter.any()}
        others = {name: randomness.normal(0, name, numbers, zero.shape)[0].to(zero) for name, zero in zeros.items()}

        def run(*arguments: torch.Tensor) -> object:
            return torch.func.functional_call(network, others, arguments)

        with torch.enable_grad(), seen.watching(exported, layers, norms):
            total = losses(run).sum()
            outputs = list(seen.outputs.items())
            gradients = torch.autograd.grad(total, [output for _, output in outputs], allow_unused=True)
        reached = {name for (name, _), gradient in zip(outputs, gradients) if gradient is not None and gradient.any()}
        without = [name for name in layers if name in seen.called - reached and layers[name].weight.requires_grad]
        # Queries and keys of a single pixel change nothing by their nature.
        without = [name for name in without if not name.endswith(("to_q", "to_k"))]
        cut = []
        for name in without[:MAX_SWITCHED_OFF]:
            hook = layers[name].register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
            changed = not torch.equal(losses(run).sum(), total.detach())
            hook.remove()
            cut += [name] if changed else []
    uncalled = [name for name in layers if name not in seen.called]
    return {
        "zero_inputs": {name: share for name, share in seen.zero_inputs().items() if share > 0},
        "idle": [*uncalled, *(name for name in without[:MAX_SWITCHED_OFF] if name not in cut)],
        "cut": cut,
        "told": seen.told,
        "received": seen.received,
    }


class _Seen:
    """What hooks saw of a forward pass."""

    def __init__(self) -> None:
        self.outputs: dict[str, torch.Tensor] = {}  # of layers, as far as they are part of the graph
        self.called: set[str] = set()
        self.told: float | None = None
        self.received: float | None = None
        self._live: dict[str, torch.Tensor] = {}  # layer -> which channels of its input are not all zero

    def zero_inputs(self) -> dict[str, float]:
        return {name: 1.0 - live.float().mean().item() for name, live in self._live.items()}

    @contextmanager
    def watching(self, exported: nn.Module, layers: dict[str, nn.Module], norms: dict[str, nn.Module]) -> Iterator[None]:
        features = (getattr(exported, name, None) for name in TIME_FEATURES)
        with ExitStack() as hooks:
            hooks.callback(exported.register_forward_pre_hook(self._note_told, with_kwargs=True).remove)
            for part in (part for part in features if isinstance(part, nn.Module)):
                hooks.callback(part.register_forward_pre_hook(self._note_received).remove)
            for name, module in layers.items():
                hooks.callback(module.register_forward_hook(partial(self._note_output, name)).remove)
            for name, module in (layers | norms).items():
                hooks.callback(module.register_forward_pre_hook(partial(self._note_input, name)).remove)
            yield

    def _note_told(self, module: nn.Module, inputs: tuple, named: dict) -> None:
        level = named.get("timestep", inputs[1] if len(inputs) > 1 else None)
        self.told = None if level is None else float(torch.as_tensor(level).float().mean())

    def _note_received(self, module: nn.Module, inputs: tuple) -> None:
        self.received = float(inputs[0].float().mean())

    def _note_output(self, name: str, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.called.add(name)
        if output.requires_grad:
            self.outputs[name] = output

    def _note_input(self, name: str, module: nn.Module, inputs: tuple) -> None:
        x = inputs[0].detach()
        if x.ndim == 4 and (x < 0).any():  # what ReLU gives may well be zero in all of a channel
            self._live[name] = (x != 0).any(dim=0).flatten(1).any(dim=1)
