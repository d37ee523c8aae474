"""Sees one update of a training loop from outside, by hooks alone: what goes into the network and comes out, the gradient of
the loss with respect to that, the gradients, the optimizer's step, the averages. Changes nothing, and draws no random number.
"""

import functools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

KEPT = 3  # micro steps of an update whose tensors are kept
SAMPLED = 1 << 15  # elements of the parameters that are looked at, at most: some tens of vectors of them are made
ASKED = 1 << 18  # elements of the parameters of a network that is asked again; larger ones: too much time and memory


@dataclass
class Call:
    """One forward pass of a module. Tensors are those of the training, detached."""

    inputs: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...] = ()
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # of the loss, by the output's place
    training: bool = True
    randomness: torch.Tensor | None = None  # state of torch's generator when it began
    autocast: torch.dtype | None = None  # in which its layers compute; None: no autocast


@dataclass
class MicroStep:
    calls: dict[str, Call] = field(default_factory=dict)  # by the name of the module; the first pass of each
    batch: dict[str, Any] = field(default_factory=dict)  # what the loop told: the loader's batch, what was drawn
    gradient_before: torch.Tensor | None = None  # sampled, [n]; None where no parameter had one
    gradient_after: torch.Tensor | None = None
    finished: bool = False  # its backward pass is over


@dataclass
class Step:
    """The optimizer around its step; vectors are sampled, [n]."""

    gradient: torch.Tensor
    gradient_norm: torch.Tensor  # of all parameters, 0-dim
    before: torch.Tensor
    state_before: dict[str, torch.Tensor]
    groups: list[dict[str, Any]]  # hyperparameters of the parameter groups
    group_of: torch.Tensor  # of each element, int64 [n]; -1: in none
    optimizer: str
    after: torch.Tensor | None = None
    state_after: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: int = 1  # how often a step was made


@dataclass
class Update:
    """What was seen of one update. `step`: updates finished before it."""

    step: int
    micro_steps: list[MicroStep] = field(default_factory=list)
    left_over: torch.Tensor | None = None  # norm of the gradients that stood there before the first forward pass
    digest_first: torch.Tensor | None = None  # of all weights, at the first forward pass
    optimizer_step: Step | None = None
    told_norm: torch.Tensor | None = None  # of its gradient before it is clipped, as the loop says, 0-dim
    digest_begun: torch.Tensor | None = None  # of all weights, when it began
    digest_step: torch.Tensor | None = None  # just before the step
    digest_stepped: torch.Tensor | None = None  # when the step and what belongs to it are over
    network: dict[str, torch.Tensor] | None = None  # its parameters and buffers in the first forward pass, to ask it again
    not_asked: str = ""  # why not
    weights: torch.Tensor | None = None  # sampled, when the step and what belongs to it are over
    row_sizes: torch.Tensor | None = None  # root mean squares of the rows of all matrices then
    averages_before: dict[str, torch.Tensor] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)
    digest_last: torch.Tensor | None = None


def judged_on(device: torch.device) -> torch.device:
    """Where what was seen is computed with, in float64: MPS has none."""
    return torch.device("cpu") if device.type == "mps" else device


def on_cpu(value: Any) -> Any:
    """What was seen, with all of its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: on_cpu(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_cpu(part) for part in value)
    if isinstance(value, (Update, MicroStep, Call, Step)):
        return replace(value, **{part.name: on_cpu(getattr(value, part.name)) for part in fields(value)})
    return value


class ElementSample:
    """A fixed choice of at most `SAMPLED` elements of tensors that have the shapes of `parameters`: every n-th of each."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self.names = list(parameters)
        self.shapes = [p.shape for p in parameters.values()]
        stride = max(1, math.ceil(sum(p.numel() for p in parameters.values()) / SAMPLED))
        self.strides = [max(1, min(stride, p.numel())) for p in parameters.values()]
        self.counts = [-(-p.numel() // stride) for p, stride in zip(parameters.values(), self.strides)]
        self.device = judged_on(next(iter(parameters.values())).device)

    def take(self, tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
        """float32 [n]; zeros for tensors that are None or have another shape."""
        parts = []
        for tensor, shape, stride, count in zip(tensors, self.shapes, self.strides, self.counts):
            known = tensor is not None and tensor.shape == shape
            part = tensor.detach().reshape(-1)[::stride] if known else torch.zeros(count)
            parts.append(part.float().to(self.device))
        return torch.cat(parts)

    def per_element(self, values: Iterable[int]) -> torch.Tensor:
        """int64 [n] of one number for each tensor."""
        return torch.repeat_interleave(torch.tensor(list(values)), torch.tensor(self.counts)).to(self.device)


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """int64, 0-dim: a sum over the bits of all tensors, each with a weight of its own. Equal tensors have equal digests."""
    total: torch.Tensor | None = None
    for number, tensor in enumerate(tensors, 1):
        tensor = tensor.detach()
        bits = tensor.reshape(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        part = bits.sum(dtype=torch.int64) * (2 * number + 1)
        total = part if total is None else total + part
    return torch.zeros((), dtype=torch.int64) if total is None else total


def _safely(look: Callable[..., Any]) -> Callable[..., Any]:
    """A look that fails ends the observation, and not the training: `failure` says why."""

    @functools.wraps(look)
    def safe(self: "Observer", *arguments: Any, **options: Any) -> Any:
        if self.update is None:
            return None
        try:
            return look(self, *arguments, **options)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.failure = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            self.update = None  # the hooks do nothing from here on; they are removed when none of them runs
            return None

    return safe


def fingerprint(rows: torch.Tensor) -> torch.Tensor:
    """int64 [B] of [B, ...]: of the bits of each row and their places, so that equal ones mean equal rows."""
    bits = rows.detach().contiguous().reshape(len(rows), -1)
    bits = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]).long()
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    weights = (places * -7046029254386353131) ^ (places << 17)  # wraps around: odd multiples of 2^64 / golden ratio, mixed
    return ((bits * 6364136223846793005 + weights) ^ ((bits + places) << 23)).mul(weights | 1).sum(1)


class Observer:
    """Watches the updates for which `begin` is called, up to the next `begin` or `rest`.

    Args:
        modules: those whose forward passes are looked at, by name; "network" is what the loop calls, unwrapped.
        averages: name -> {parameter's name: averaged tensor}, such as an EMA's.
        eager: whether the network runs eagerly in what is watched, for which the caller cares; where it runs compiled, its
            passes are not observed.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        averages: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        eager: bool = True,
    ):
        self.modules, self.eager = dict(modules), eager
        self.averages = dict(averages or {})
        network = self.modules["network"]
        self.parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
        # The random frequencies of a Fourier time embedding are meant to stay.
        self.frozen = [n for n, p in network.named_parameters() if not p.requires_grad and not n.startswith("time_proj.")]
        self.sample = ElementSample(self.parameters)
        self._device = next(iter(self.parameters.values())).device
        self._hooks = ExitStack()
        self.update: Update | None = None
        self.failure = ""  # why the newest observation ended early
        self._ids = {id(p): number for number, p in enumerate(self.parameters.values())}
        self._gradients: dict[int, torch.Tensor] = {}  # sampled, as the newest backward pass left them
        self._asks = False
        self._has_run_backward = False

    # ---- what the loop tells

    @torch.no_grad()
    def begin(self, step: int, asks: bool = False) -> None:
        """Watches the update that follows `step` finished ones. `asks`: keeps what it takes to ask the network again."""
        self.rest()
        self._asks = asks
        self.update = Update(step, digest_begun=digest(self.parameters.values()))
        if self.eager:
            for name, module in self.modules.items():
                before = module.register_forward_pre_hook(partial(self._before_forward, name), with_kwargs=True)
                self._hooks.callback(before.remove)
                self._hooks.callback(module.register_forward_hook(partial(self._after_forward, name)).remove)
            inner = self.modules.get("unet", self.modules["network"])
            first = next(m for m in inner.modules() if next(m.parameters(recurse=False), None) is not None)
            self._hooks.callback(first.register_forward_pre_hook(self._see_autocast).remove)
        for parameter in self.parameters.values():
            self._hooks.callback(parameter.register_post_accumulate_grad_hook(self._see_gradient).remove)
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._gradients, self._has_run_backward = {}, False

    @_safely
    def begin_micro_step(self, **facts: Any) -> None:
        """Of a loop that says where one begins; else it begins with the network's forward pass."""
        self._close_micro_step()
        self.tell(**facts)

    @_safely
    def tell(self, **facts: Any) -> None:
        """What the loop knows of the micro step under way."""
        self._micro_step().batch.update(facts)

    @_safely
    @torch.no_grad()
    def end_step(self) -> None:
        """When the weights are those of the next update: the optimizer's step and what belongs to it are over."""
        self._close_micro_step()
        self.update.weights = self.sample.take(self.parameters.values())
        self.update.digest_stepped = digest(self.parameters.values())
        matrices = [p.detach() for p in self.parameters.values() if p.ndim > 1]
        self.update.row_sizes = torch.cat([m.flatten(1).float().square().mean(1).sqrt() for m in matrices])

    def end_update(self) -> Update | None:
        """When the averages have been updated too; stops watching. None where nothing was watched."""
        update = self._end_update()
        self.rest()
        return update

    @_safely
    @torch.no_grad()
    def _end_update(self) -> Update | None:
        self.update.averages = self._take_averages()
        self.update.digest_last = digest(self.parameters.values())
        return self.update

    def rest(self) -> None:
        self._hooks.close()
        self.update = None

    # ---- what the hooks see

    def _micro_step(self) -> MicroStep:
        """The one under way: a new one begins with the first thing that is told or seen after a backward pass."""
        steps = self.update.micro_steps
        if not steps or steps[-1].finished:
            steps.append(MicroStep())
        return steps[-1]

    def _close_micro_step(self) -> None:
        steps = self.update.micro_steps
        if steps and self._has_run_backward:
            self._has_run_backward, steps[-1].finished = False, True
            parts = [self._gradients.get(number) for number in range(len(self._ids))]
            zeros = (torch.zeros(count, device=self.sample.device) for count in self.sample.counts)
            steps[-1].gradient_after = torch.cat([zero if part is None else part for part, zero in zip(parts, zeros)])
            if len(steps) > KEPT:  # of an update of many micro steps the first ones and the last are kept
                forgotten = steps[-2]
                forgotten.calls, forgotten.batch, forgotten.gradient_before, forgotten.gradient_after = {}, {}, None, None

    def averaged(self, name: str) -> torch.Tensor:
        """Which elements of the sample that average has, bool [n]."""
        return self.sample.per_element(parameter in self.averages[name] for parameter in self.sample.names).bool()

    def _take_averages(self) -> dict[str, torch.Tensor]:
        return {
            name: self.sample.take(tensors.get(parameter) for parameter in self.sample.names)
            for name, tensors in self.averages.items()
        }

    @_safely
    def _before_forward(self, name: str, module: nn.Module, inputs: tuple, options: dict) -> None:
        if not torch.is_grad_enabled():
            return
        if name == "network":
            self._close_micro_step()
        step = self._micro_step()
        if name == "network" and name not in step.calls:
            self._see_start(step)
        values = tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in (*inputs, *options.values()))
        call = step.calls.setdefault(name, Call(values, training=module.training))
        if self._asks and len(self.update.micro_steps) == 1 and call.randomness is None:
            call.randomness = self.generator_state()

    @torch.no_grad()
    def _see_start(self, step: MicroStep) -> None:
        gradients = [p.grad for p in self.parameters.values()]
        known = [g for g in gradients if g is not None]
        if len(self.update.micro_steps) == 1:
            self.update.left_over = torch.stack(torch._foreach_norm(known)).norm() if known else torch.zeros(())
            self.update.digest_first = digest(self.parameters.values())
            self.update.averages_before = self._take_averages()
        if known:
            step.gradient_before = self.sample.take(gradients)

    @_safely
    def _after_forward(self, name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        call = self._micro_step().calls.get(name)
        if call is None or call.outputs:
            return
        values = outputs_of(output)
        call.outputs = tuple(v.detach() for v in values)
        if name == "network" and self._asks and len(self.update.micro_steps) == 1:
            self._keep_network(module)
        for place, value in enumerate(values):
            if value.requires_grad:
                value.register_hook(self._keep(call, place))

    def _keep_network(self, module: nn.Module) -> None:
        if sum(p.numel() for p in self.parameters.values()) > ASKED:
            self.update.not_asked = "it would take too much time with a network of this size"
        else:
            tensors = [*module.named_parameters(), *module.named_buffers()]
            self.update.network = {name: tensor.detach().clone() for name, tensor in tensors}

    def _keep(self, call: Call, place: int):
        def keep(gradient: torch.Tensor) -> None:
            call.gradients[place] = gradient.detach()

        return keep

    @_safely
    def _see_autocast(self, module: nn.Module, inputs: tuple) -> None:
        if not self.update.micro_steps:
            return
        call = self.update.micro_steps[-1].calls.get("network")
        device = next(iter(self.parameters.values())).device.type
        if call is None or call.outputs or not torch.amp.is_autocast_available(device):
            return
        if torch.is_autocast_enabled(device):
            call.autocast = torch.get_autocast_dtype(device)

    @_safely
    @torch.no_grad()
    def _see_gradient(self, parameter: torch.Tensor) -> None:
        number = self._ids.get(id(parameter))
        if number is not None and parameter.grad is not None:
            stride = self.sample.strides[number]
            self._has_run_backward = True
            part = parameter.grad.detach().reshape(-1)[::stride].float()
            self._gradients[number] = part.to(self.sample.device, copy=True)

    def _ours(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    @_safely
    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        if not self._ours(optimizer):
            return
        if self.update.optimizer_step is not None:
            self.update.optimizer_step.steps += 1
            return
        self._close_micro_step()
        self.update.digest_step = digest(self.parameters.values())
        gradients = [p.grad for p in self.parameters.values()]
        known = [g for g in gradients if g is not None]
        groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        member = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.update.optimizer_step = Step(
            gradient=self.sample.take(gradients),
            gradient_norm=torch.stack(torch._foreach_norm(known)).norm() if known else torch.zeros(()),
            before=self.sample.take(self.parameters.values()),
            state_before=self._state(optimizer),
            groups=groups,
            group_of=self.sample.per_element(member.get(id(p), -1) for p in self.parameters.values()),
            optimizer=type(optimizer).__name__,
        )

    def generator_state(self) -> torch.Tensor:
        device = self._device
        return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def set_generator(self, state: torch.Tensor) -> None:
        device = self._device
        torch.set_rng_state(state) if device.type == "cpu" else torch.get_device_module(device).set_rng_state(state, device)

    @_safely
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        if self.update.optimizer_step is None or not self._ours(optimizer):
            return
        step = self.update.optimizer_step
        step.after, step.state_after = self.sample.take(self.parameters.values()), self._state(optimizer)

    def _state(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """The optimizer's state, sampled, and "step": how many it has counted, [n]."""
        states = [optimizer.state.get(p, {}) for p in self.parameters.values()]
        names = dict.fromkeys(name for state in states for name, value in state.items() if isinstance(value, torch.Tensor))
        found = {name: self.sample.take(state.get(name) for state in states) for name in names if name != "step"}
        if "step" in names:
            counted = torch.stack([torch.as_tensor(state.get("step", 0.0)).float().cpu().reshape(()) for state in states])
            found["step"] = torch.repeat_interleave(counted, torch.tensor(self.sample.counts)).to(self.sample.device)
        return found


def outputs_of(output: Any) -> list[torch.Tensor]:
    """The tensors that a network returns."""
    values = tuple(output.values()) if isinstance(output, Mapping) else output  # diffusers' outputs
    return [v for v in (values if isinstance(values, (tuple, list)) else [values]) if isinstance(v, torch.Tensor)]
