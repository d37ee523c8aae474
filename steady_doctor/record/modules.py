"""The modules that are called in a recorded update, and hold what is trained."""

import gc
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from steady_doctor.record.samples import sample
from steady_doctor.record.tape import key_of

ALIKE = 0.5  # the least cosine of a weight and its average
FEWEST = 256  # numbers of a weight, for its distribution to be told
LEAST_SPREAD = 0.35  # of 64 numbers that are uniform from -1 to 1, whose spread is 0.577, with a standard error of 0.03


@dataclass
class Network:
    """The outermost module of a call, as it stood then."""

    name: str  # of its class
    trained: int = 0  # numbers
    frozen: int = 0
    rests: set[int] = field(default_factory=set)  # the places of these
    drops: list[bool] = field(default_factory=list)  # of each layer that leaves something out by chance: its mode is training
    batch_norms: list[bool] = field(default_factory=list)  # of each: its mode is training
    training: bool = True  # its own mode
    as_made: list[str] = field(default_factory=list)  # frozen weights that have their first random values


class Modules:
    """`see` is a hook before each forward pass of any module."""

    def __init__(self, parameters: Iterable[Tensor]):
        self._trained = {id(parameter) for parameter in parameters}
        self._inside: set[int] = set()
        self._outermost: set[int] = set()
        self.networks: list[Network] = []

    def knows(self, module: nn.Module) -> bool:
        """Whether there is nothing to see: a call costs far less than a look."""
        return id(module) in self._inside or not torch.is_grad_enabled()

    def see(self, module: nn.Module) -> None:
        if not any(id(parameter) in self._trained for parameter in module.parameters()):
            return
        self._outermost.add(id(module))
        self._inside |= {id(each) for each in module.modules()}
        network = Network(type(module).__name__, training=module.training)
        resting = {id(below) for part in module.modules() if _is_frozen(part) for below in part.modules()}
        trained: dict[torch.Size, list[Tensor]] = {}
        for parameter in module.parameters():
            if parameter.requires_grad:
                trained.setdefault(parameter.shape, []).append(parameter)
        for name, each in module.named_modules():
            if isinstance(each, _BatchNorm):
                network.batch_norms.append(each.training)
            elif id(each) not in resting and drops(each):
                network.drops.append(each.training)
            for of_which, parameter in each.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    network.frozen += parameter.numel()
                    network.rests.add(key_of(parameter))
                    if (
                        parameter.ndim > 1
                        and _as_made(parameter)
                        and not _is_average(parameter, trained.get(parameter.shape, []))
                    ):
                        network.as_made.append(f"{name}.{of_which}")
                elif id(parameter) in self._trained:
                    network.trained += parameter.numel()
        self.networks.append(network)

    def is_outermost(self, module: nn.Module) -> bool:
        """Whether this call, which ends, is that of a network, and learns."""
        return id(module) in self._outermost and torch.is_grad_enabled()


def owner_of(parameters: list[Tensor]) -> nn.Module | None:
    """The smallest module that has most of these, rather than a list of modules; None where no module has any."""
    trained, best, owner = {id(parameter) for parameter in parameters}, (0, False, 0), None
    for module in gc.get_objects():
        if issubclass(type(module), nn.Module):  # isinstance would ask stand-ins of other libraries, which then import them
            with suppress(Exception):  # one that is not complete
                own = [id(parameter) in trained for parameter in nn.Module.parameters(module)]
                is_list = type(module).__module__ == nn.ModuleList.__module__
                rank = sum(own), not is_list, -len(list(nn.Module.modules(module)))
                if rank[0] and rank > best:
                    best, owner = rank, module
    return owner


def _is_average(weight: Tensor, trained: list[Tensor]) -> bool:
    """Whether it is what one of these is or was, as that of a teacher, which follows the network."""
    own = sample(weight).cpu()
    others = (sample(one).cpu() for one in trained)
    return any(float(own @ other) > ALIKE * float(own.norm() * other.norm()) for other in others)


def _as_made(weight: Tensor) -> bool:
    """Whether a weight is uniform to 1 / sqrt(fan-in), as torch's layers begin."""
    size = weight[0].numel() ** 0.5
    some = sample(weight).cpu() * size  # tell of most others that they are not, without a copy of all
    if weight.numel() < FEWEST or float(some.abs().max()) > 1 + 1e-6 or float(some.std()) < LEAST_SPREAD:
        return False
    values = weight.detach().double().flatten() * size
    if float(values.abs().max()) > 1 + 1e-6:
        return False
    return abs(float(values.std()) * 3**0.5 - 1) < 0.1 and abs(float((values.abs() < 0.5).double().mean()) - 0.5) < 0.1


def drops(module: nn.Module) -> bool:
    """Whether it leaves something out by chance in training mode, itself or by a module that it calls."""
    share: Any = module.p if isinstance(module, _DropoutNd) else vars(module).get("dropout")
    if isinstance(share, float) and share > 0:
        return True
    code = getattr(getattr(type(module), "forward", None), "__code__", None)  # a scripted module has none
    if code is None or "training" not in code.co_names or type(module).__module__.startswith(("torch.", "diffusers.")):
        return False
    numbers = (named for each in module.modules() for named in vars(each).items())
    return any("drop" in name and isinstance(value, float) and 0 < value < 1 for name, value in numbers)


def _is_frozen(module: nn.Module) -> bool:
    """Whether it has parameters, and trains none of them: an encoder, say, which rests in evaluation mode."""
    has_any = next(module.parameters(), None) is not None
    return has_any and not any(parameter.requires_grad for parameter in module.parameters())
