"""What the objects of a script say of themselves: Accelerate's settings, schedules of the learning rate, averaged weights."""

import argparse
import gc
import re
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

DEEP = 5  # attributes of attributes, in which names are looked for
LATEST = 100_000  # update after which an average may be meant to begin
MOST_BESIDE = 4  # numbers that a dict of an average has beside its tensors, such as a decay
MOST_ENTRIES = 64  # of a dict or list that is looked into


@dataclass
class Average:
    """Tensors that follow the weights, or seem meant to."""

    name: str
    tensors: dict[str, torch.Tensor]  # by the parameter's name
    owner: Any  # the object that holds them
    is_average: bool = True  # by its class or its name; else it is one if it moves
    begins: int = 0  # the update after which it is to average, as its owner or the command line says; 0: none does
    place: str = ""  # where the script has a dict or list of tensors, which may be made anew in each update

    def now(self) -> dict[str, torch.Tensor]:
        """The tensors as they are now, by the parameter's name."""
        if isinstance(self.owner, (list, tuple, dict)):
            found = _found_at(self.place) if self.place else None
            self.owner = found if type(found) is type(self.owner) and len(found) == len(self.owner) else self.owner
            values = _values_of(self.owner, list(self.tensors))
            if all(isinstance(v, torch.Tensor) and v.shape == t.shape for v, t in zip(values, self.tensors.values())):
                self.tensors = dict(zip(self.tensors, values))
        return self.tensors

    @property
    def updates(self) -> int:
        """Of its own, as it counts them; 0 where it does not."""
        return int(getattr(self.owner, "optimization_step", 0)) if self.settings is not None else 0

    @property
    def settings(self) -> "EMASettings | None":
        if type(self.owner).__name__ != "EMAModel" or not hasattr(self.owner, "update_after_step"):
            return None
        o = self.owner
        return EMASettings(o.decay, o.min_decay, o.update_after_step, o.use_ema_warmup, o.inv_gamma, o.power)


@dataclass(frozen=True)
class EMASettings:
    """Of diffusers' EMAModel; its documentation's formula, written here once more."""

    decay: float
    min_decay: float
    update_after_step: int
    warmup: bool
    inv_gamma: float
    power: float

    def at(self, number: int) -> float:
        """Decay of the average's own update `number`, from 1."""
        step = max(0, number - self.update_after_step - 1)
        if step == 0:
            return 0.0
        value = 1 - (1 + step / self.inv_gamma) ** -self.power if self.warmup else (1 + step) / (10 + step)
        return max(min(value, self.decay), self.min_decay)


@dataclass
class Facts:
    accelerator: Any = None
    schedules: list[Any] = field(default_factory=list)  # of the learning rate of the optimizer
    averages: list[Average] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    noise_schedulers: list[Any] = field(default_factory=list)
    autoencoder: Any = None
    others: list[Any] = field(default_factory=list)  # schedules of the learning rate of other optimizers
    encoders: list[nn.Module] = field(default_factory=list)  # of texts, by transformers
    empty: bool = False  # there is an EMAModel without tensors
    shared: str = ""  # the name of an average that holds the network's own weights, which have another name too
    options: dict[str, Any] = field(default_factory=dict)  # of the script's command line, as argparse gave them

    def add(self, told: "Facts") -> None:
        """What the script told by itself comes first."""
        self.accelerator = told.accelerator or self.accelerator
        self.noise_schedulers = told.noise_schedulers or self.noise_schedulers
        known = {id(average.owner) for average in self.averages}
        self.averages += [average for average in told.averages if id(average.owner) not in known]

    @property
    def micro_steps(self) -> int | None:
        """Declared to Accelerate; its default of 1 says nothing of a loop that accumulates by hand."""
        found = 1 if self.accelerator is None else int(self.accelerator.gradient_accumulation_steps)
        return found if found > 1 else None

    @property
    def precision(self) -> str | None:
        return None if self.accelerator is None else str(self.accelerator.mixed_precision)


def find_facts(network: nn.Module, optimizer: Optimizer) -> Facts:
    """Looks through all objects of the process, which takes some tenths of a second."""
    parameters = dict(network.named_parameters())
    shapes = [p.shape for p in parameters.values()]
    trained = {name: p for name, p in parameters.items() if p.requires_grad}  # averages may have these alone
    sizes = {len(shapes), len(trained), len(network.state_dict())} - {0, 1}
    roomy = range(min(sizes, default=0), max(sizes, default=0) + MOST_BESIDE + 1)
    own = {p.data_ptr() for p in parameters.values()}
    facts = Facts()
    optimizers: list[Optimizer] = []
    kinds: dict[type, str] = {}
    lists: list[Any] = []
    networks: list[nn.Module] = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is list or kind is dict or kind is tuple or kind is OrderedDict:
            if len(thing) in (sizes if kind is list or kind is tuple else roomy):
                lists.append(thing)
            continue
        word = kinds.get(kind)
        if word is None:
            word = kinds[kind] = _word(kind, type(network))
        if not word:
            continue
        if word == "accelerator":
            facts.accelerator = thing
        elif word == "schedule" and getattr(thing, "optimizer", None) is optimizer:
            facts.schedules.append(thing)
        elif word == "schedule":
            facts.others.append(thing)
        elif word == "encoder":
            facts.encoders.append(thing)
        elif word == "optimizer":
            optimizers.append(thing)
        elif word == "loader":
            facts.loaders.append(thing)
        elif word == "scheduler":
            facts.noise_schedulers.append(thing)
        elif word == "autoencoder":
            facts.autoencoder = thing
        elif word == "options":
            facts.options |= vars(thing)
        elif word == "ema":
            shadow = list(getattr(thing, "shadow_params", ()))
            facts.empty |= getattr(thing, "shadow_params", None) == []
            for known in (parameters, trained):
                if [p.shape for p in shadow] == [p.shape for p in known.values()]:
                    facts.averages.append(Average("EMA", dict(zip(known, shadow)), thing))
                    break
        elif word == "averaged":
            inner = dict(thing.module.named_parameters())
            tensors = {name: inner[name] for name in parameters if name in inner}
            tensors = tensors or {n: inner[f"module.{n}"] for n in parameters if f"module.{n}" in inner}
            if tensors:
                facts.averages.append(Average("AveragedModel", dict(tensors), thing))
        elif word == "copy" and thing is not network:
            networks.append(thing)
    own |= {p.data_ptr() for o in optimizers for group in getattr(o, "param_groups", ()) for p in group["params"]}
    names = _names({id(thing) for thing in (network, *networks, *lists)})
    called = [name.rsplit(".", 1)[-1] for name in names.get(id(network), ())]
    if not all(map(says_average, called)):
        facts.shared = next(filter(says_average, called), "")
    first = {place: next(filter(_ends_as_average, found), found[0]) for place, found in names.items()}
    _add_copies(facts, networks, parameters, own, first)
    taken = _storages(facts, own, parameters, optimizer)
    for known in (parameters, trained) if len(trained) < len(parameters) else (parameters,):
        _add_lists(facts, lists, known, taken, first)
    for average in facts.averages:
        average.begins = _beginning(average.name, facts.options)
    return facts


def _beginning(place: str, options: Mapping[str, Any]) -> int:
    """Of an average at that place, as an option or an attribute of what holds it says: `ema_start`, `update_after_step`."""
    parts = place.split(".")
    holders = [_found_at(".".join(parts[:count])) for count in range(1, len(parts))]
    said = [(name, value) for holder in holders if holder is not None for name, value in _parts(holder)]
    said += [(name, value) for name, value in options.items() if "ema" in name]
    said += [default for scope in _scopes() for value in list(scope.values()) for default in _defaults(value)]
    found = [v for n, v in said if type(v) is int and any(word in n for word in ("after", "start", "begin", "warmup"))]
    return max((value for value in found if value <= LATEST), default=0)


def _defaults(value: Any) -> Iterator[tuple[str, Any]]:
    """What the functions of an object that makes averages, by its class's name, are called with where nothing is said."""
    if "ema" not in type(value).__name__.lower() or isinstance(value, type):
        return
    for function in vars(type(value)).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            yield from zip(names[-len(function.__defaults__) :], function.__defaults__)


def _word(kind: type, network: type) -> str:
    names = {base.__name__ for base in kind.__mro__}
    if "Accelerator" in names and kind.__module__.startswith("accelerate"):
        return "accelerator"
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        return "schedule"
    if issubclass(kind, torch.optim.swa_utils.AveragedModel):
        return "averaged"
    if issubclass(kind, network):
        return "copy"
    if "EMAModel" in names:
        return "ema"
    if issubclass(kind, Optimizer):
        return "optimizer"
    if issubclass(kind, torch.utils.data.DataLoader):
        return "loader"
    if issubclass(kind, argparse.Namespace):
        return "options"
    if "SchedulerMixin" in names:
        return "scheduler"
    if "PreTrainedModel" in names and str(kind.__module__).startswith("transformers."):
        return "encoder"
    return "autoencoder" if kind.__name__.startswith("AutoencoderKL") else ""


def _add_copies(
    facts: Facts,
    networks: list[nn.Module],
    parameters: Mapping[str, torch.Tensor],
    own: set[int],
    names: Mapping[int, str],
) -> None:
    taken = {t.data_ptr() for average in facts.averages for t in average.tensors.values()}
    for copy in networks:
        theirs: dict[str, torch.Tensor] = dict(copy.named_parameters())
        if list(theirs) != list(parameters) or any(theirs[n].shape != p.shape for n, p in parameters.items()):
            continue
        pointers = {p.data_ptr() for p in theirs.values()}
        if pointers & own or pointers & taken:
            continue
        name = names.get(id(copy), "")
        facts.averages.append(Average(name or "a copy of the network", theirs, copy, says_average(name)))


def _storages(facts: Facts, own: set[int], parameters: Mapping[str, torch.Tensor], optimizer: Optimizer) -> set[int]:
    """Where the tensors lie that are known not to be another average."""
    taken = {t.data_ptr() for average in facts.averages for t in average.tensors.values()}
    taken |= own | {p.grad.data_ptr() for p in parameters.values() if p.grad is not None}
    return taken | {v.data_ptr() for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)}


def _add_lists(
    facts: Facts, lists: list[Any], parameters: Mapping[str, torch.Tensor], taken: set[int], names: Mapping[int, str]
) -> None:
    shapes = [p.shape for p in parameters.values()]
    for thing in lists:
        values = _values_of(thing, list(parameters))
        if not all(isinstance(v, torch.Tensor) for v in values) or [v.shape for v in values] != shapes:
            continue
        pointers = {v.data_ptr() for v in values}
        last = names.get(id(thing), "").rsplit(".", 1)[-1]
        if [v.data_ptr() for v in values] == [p.data_ptr() for p in parameters.values()] and says_average(last):
            facts.shared = names[id(thing)]
        if pointers & taken or len(pointers) < len(values) or not all(v.is_floating_point() for v in values):
            continue
        name = names.get(id(thing), "")
        is_average = says_average(name)
        if isinstance(thing, tuple) and not is_average:
            continue
        facts.averages.append(
            Average(name or "a list of tensors", dict(zip(parameters, values)), thing, is_average, place=name)
        )
        taken |= pointers


def _names(wanted: Collection[int]) -> dict[int, list[str]]:
    """Under which names the script has the objects of these ids: variables of its functions, attributes of its objects."""
    layer = [variable for scope in _scopes() for variable in scope.items()]
    found: dict[int, list[str]] = {}
    visited: set[int] = set()
    for _ in range(DEEP):
        following: list[tuple[str, Any]] = []
        for name, value in layer:
            if id(value) in wanted:
                found.setdefault(id(value), []).append(name)
            if id(value) not in visited and not isinstance(value, (type, ModuleType, torch.Tensor)):
                visited.add(id(value))
                following += [(f"{name}.{inner}", part) for inner, part in _parts(value)]
        layer = following
    return found


def _scopes() -> list[dict[str, Any]]:
    """The variables of the script's functions that run, the innermost first, and of its module."""
    frame: FrameType | None = sys._getframe()
    scopes = []
    while frame is not None:
        if not any(part in frame.f_code.co_filename for part in ("/torch/", "/watching/", "/accelerate/")):
            scopes.append(frame.f_locals)
        frame = frame.f_back
    main = sys.modules.get("__main__")
    return [*scopes, vars(main)] if main is not None else scopes


def _found_at(place: str) -> Any:
    """What the script has there now; None where nothing is."""
    first, *rest = place.split(".")
    value = next((scope[first] for scope in _scopes() if first in scope), None)
    for name in rest:
        value = next((part for inner, part in _parts(value) if inner == name), None)
    return value


def _values_of(thing: Any, names: list[str]) -> list[Any]:
    """Of a list in the order of the parameters, of a dict by their names, where it has them."""
    if not isinstance(thing, dict):
        return list(thing)
    for prefix in ("", "module."):
        if all(prefix + name in thing for name in names):
            return [thing[prefix + name] for name in names]
    return [value for value in thing.values() if not isinstance(value, torch.Tensor) or value.ndim]


def _parts(value: Any) -> list[tuple[str, Any]]:
    parts = list(getattr(value, "__dict__", {}).items())
    if isinstance(value, nn.Module):
        own = [(name, part) for name, part in parts if not name.startswith("_")]
        return [*own, ("buffers", value._buffers), *value._modules.items()]
    if isinstance(value, dict) and len(value) <= MOST_ENTRIES:
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, (list, tuple)) and len(value) <= MOST_ENTRIES:
        return [(str(place), part) for place, part in enumerate(value)]
    return parts


def _ends_as_average(name: str) -> bool:
    return says_average(name.rsplit(".", 1)[-1])


def says_average(name: str) -> bool:
    return bool(re.search(r"(?<![a-z])ema|(?<![A-Z])EMA", name)) or any(w in name.lower() for w in ("avg", "average", "shadow"))


def schedule_length(schedule: Any) -> int | None:
    """In steps of its own, as its settings say."""
    rises = float(getattr(schedule, "end_factor", 0.0)) > float(getattr(schedule, "start_factor", 1.0))
    if rises or hasattr(schedule, "factor"):  # a warm-up
        return None
    for name in ("T_max", "total_iters", "total_steps"):
        if isinstance(getattr(schedule, name, None), int):
            return int(getattr(schedule, name))
    for function in getattr(schedule, "lr_lambdas", ()):
        found = _captured(function).get("num_training_steps")
        if isinstance(found, int):
            return found
    return None


def _captured(function: Any) -> dict[str, Any]:
    keywords = dict(getattr(function, "keywords", None) or {})
    inner = getattr(function, "func", function)
    code, cells = getattr(inner, "__code__", None), getattr(inner, "__closure__", None) or ()
    if code is not None:
        for name, cell in zip(code.co_freevars, cells):
            try:
                keywords.setdefault(name, cell.cell_contents)
            except ValueError:
                continue
    return keywords
