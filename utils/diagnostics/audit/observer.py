"""Sees one update of a training loop from outside, by hooks alone: what goes into the network and comes out, the gradient of
the loss with respect to that, the gradients, the optimizer's step, the averages. Changes nothing, and draws no random number.
"""

import functools
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from utils.diagnostics.audit.elements import ElementSample, digest
from utils.diagnostics.audit.seen import Call, MicroStep, Step, Update, tensors_in

KEPT = 3  # micro steps of an update whose tensors are kept
ASKED = 1 << 18  # elements of the parameters of a network that is asked again; larger ones: too much time and memory


def failure_text(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def safely(look: Callable[..., Any]) -> Callable[..., Any]:
    """A look that fails ends the observation, and not the training: `failure` says why."""

    @functools.wraps(look)
    def safe(self: "Observer", *arguments: Any, **options: Any) -> Any:
        if self.update is None:
            return None
        try:
            return look(self, *arguments, **options)
        except Exception as error:
            self.failure = failure_text(error)
            self.update = None  # the hooks do nothing from here on; they are removed when none of them runs
            return None

    return safe


class Observer:
    """Watches the updates for which `begin` is called, up to the next `begin` or `rest`.

    Args:
        modules: those whose forward passes are looked at, by name; "network" is what the loop calls, unwrapped.
        averages: name -> {parameter's name: averaged tensor}, such as an EMA's.
        eager: whether the network runs eagerly in what is watched, for which the caller cares; where it runs compiled, its
            passes are not observed.
        trained: the module whose parameters are trained, where it is not the network.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        averages: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        eager: bool = True,
        trained: nn.Module | None = None,
    ):
        self.modules, self.eager = dict(modules), eager
        self.averages = dict(averages or {})
        self.trained = self.modules["network"] if trained is None else trained
        self.parameters = {name: p for name, p in self.trained.named_parameters() if p.requires_grad}
        self.frozen = self._frozen()
        self.sample = ElementSample(self.parameters)
        self.device = next(iter(self.parameters.values())).device
        self._hooks: list[Any] = []  # handles that remove them
        self.update: Update | None = None
        self.failure = ""  # why the newest observation ended early
        self._ids = {id(p): number for number, p in enumerate(self.parameters.values())}
        self._gradients: dict[int, torch.Tensor] = {}  # sampled, as the newest backward pass left them
        self._asks = self._has_run_backward = False

    # ---- what the loop tells

    @torch.no_grad()
    def begin(self, step: int, asks: bool = False, weights: torch.Tensor | None = None) -> None:
        """Watches the update that follows `step` finished ones. `asks`: keeps what it takes to ask the network again.
        `weights`: their digest, where it is known."""
        self.rest()
        self._asks = asks
        self.update = Update(step, digest_begun=digest(self.parameters.values()) if weights is None else weights)
        self.frozen = self._frozen()
        self._watch()

    def _frozen(self) -> list[str]:
        """Names of parameters that are not trained now, but for the random frequencies of a Fourier time embedding."""
        named = self.modules["network"].named_parameters()
        return [name for name, p in named if not p.requires_grad and not name.startswith("time_proj.")]

    @safely
    def _watch(self) -> None:
        if self.eager:
            for name, module in self.modules.items():
                before, after = partial(self._before_forward, name), partial(self._after_forward, name)
                self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(after))
            first = next(m for m in self.averaged_module.modules() if next(m.parameters(recurse=False), None) is not None)
            self._hooks.append(first.register_forward_pre_hook(self._see_autocast))
        trained = [p for p in self.parameters.values() if p.requires_grad]  # a loop may freeze some on its way
        self._hooks += [p.register_post_accumulate_grad_hook(self._see_gradient) for p in trained]
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        self._hooks.append(register_optimizer_step_post_hook(self._after_step))
        self._gradients, self._has_run_backward = {}, False

    @safely
    def begin_micro_step(self, **facts: Any) -> None:
        """Of a loop that says where one begins; else it begins with the network's forward pass."""
        self._close_micro_step()
        self.tell(**facts)
        if not self.eager:  # no forward pass will be seen
            self._see_start(self._micro_step())

    @safely
    def tell(self, **facts: Any) -> None:
        """What the loop knows of the micro step under way."""
        self._micro_step().batch.update(facts)

    @safely
    @torch.no_grad()
    def end_step(self) -> None:
        """When the weights are those of the next update: the optimizer's step and what belongs to it are over."""
        self._close_micro_step()
        self.update.weights = self.sample.take(self.parameters.values())
        self.update.digest_stepped = digest(self.parameters.values())
        matrices = [p.detach() for p in self.parameters.values() if p.ndim > 1]
        sizes = [m.flatten(1).float().square().mean(1).sqrt() for m in matrices]
        self.update.row_sizes = torch.cat(sizes) if sizes else None  # of flat copies of all weights

    def end_update(self) -> Update | None:
        """When the averages have been updated too; stops watching. None where nothing was watched."""
        update = self._end_update()
        self.rest()
        return update

    @safely
    @torch.no_grad()
    def _end_update(self) -> Update | None:
        self.update.averages = self._take_averages()
        self.update.digest_last = digest(self.parameters.values())
        return self.update

    def rest(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.update = [], None

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
            parts = [self._gradients.get(number, self.sample.part(number, None)) for number in range(len(self._ids))]
            steps[-1].gradient_after = torch.cat(parts)
            if len(steps) > KEPT:  # of an update of many micro steps the first ones and the last are kept
                forgotten = steps[-2]
                forgotten.calls, forgotten.batch, forgotten.gradient_before, forgotten.gradient_after = {}, {}, None, None

    @property
    def averaged_module(self) -> nn.Module:
        """What an average is of: the raw network in a denoiser, else the network."""
        return self.modules.get("unet", self.modules["network"])

    def averaged(self, name: str) -> torch.Tensor:
        """Which elements of the sample that average has, bool [n]."""
        return self.sample.per_element(parameter in self.averages[name] for parameter in self.sample.names).bool()

    def _take_averages(self) -> dict[str, torch.Tensor]:
        return {
            name: self.sample.take(tensors.get(parameter) for parameter in self.sample.names)
            for name, tensors in self.averages.items()
        }

    @safely
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
        if name == "network" and call.randomness is None:
            call.randomness = generator_state(self.device)

    @torch.no_grad()
    def _see_start(self, step: MicroStep) -> None:
        gradients = [p.grad for p in self.parameters.values()]
        if len(self.update.micro_steps) == 1:
            self.update.left_over = _norm(gradients)
            self.update.digest_first = digest(self.parameters.values())
            self.update.averages_before = self._take_averages()
        if any(gradient is not None for gradient in gradients):
            step.gradient_before = self.sample.take(gradients)

    @safely
    def _after_forward(self, name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        call = self._micro_step().calls.get(name)
        if call is None or call.outputs:
            return
        call.outputs = tuple(value.detach() for value in tensors_in(output))
        if name == "network" and self._asks and len(self.update.micro_steps) == 1:
            self._keep_network(module)
        for place, value in enumerate(tensors_in(output)):
            if value.requires_grad:
                value.register_hook(partial(_keep, call, place))

    def _keep_network(self, module: nn.Module) -> None:
        if sum(p.numel() for p in self.parameters.values()) > ASKED:
            self.update.not_asked = "it would take too much time with a network of this size"
        else:
            tensors = [*module.named_parameters(), *module.named_buffers()]
            self.update.network = {name: tensor.detach().clone() for name, tensor in tensors}

    @safely
    def _see_autocast(self, module: nn.Module, inputs: tuple) -> None:
        if not self.update.micro_steps:
            return
        call = self.update.micro_steps[-1].calls.get("network")
        device = self.device.type
        if call is None or call.outputs or not torch.amp.is_autocast_available(device):
            return
        if torch.is_autocast_enabled(device):
            call.autocast = torch.get_autocast_dtype(device)

    @safely
    def _see_gradient(self, parameter: torch.Tensor) -> None:
        number, gradient = self._ids.get(id(parameter)), parameter.grad
        if number is not None and gradient is not None:
            self._has_run_backward = True
            self._gradients[number] = self.sample.part(number, gradient).clone()

    def _ours(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    @safely
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
        groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        member = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.update.optimizer_step = Step(
            gradient=self.sample.take(gradients),
            gradient_norm=_norm(gradients),
            before=self.sample.take(self.parameters.values()),
            state_before=self._state(optimizer),
            groups=groups,
            group_of=self.sample.per_element(member.get(id(p), -1) for p in self.parameters.values()),
            optimizer=type(optimizer).__name__,
        )

    @safely
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        step = self.update.optimizer_step
        if step is not None and self._ours(optimizer):
            step.after, step.state_after = self.sample.take(self.parameters.values()), self._state(optimizer)

    def _state(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """The optimizer's state, sampled, and "step": how many it has counted, [n]."""
        states = [optimizer.state.get(p, {}) for p in self.parameters.values()]
        names = dict.fromkeys(name for state in states for name, value in state.items() if isinstance(value, torch.Tensor))
        found = {name: self.sample.take(state.get(name) for state in states) for name in names if name != "step"}
        if "step" in names:
            found["step"] = self.sample.per_element(int(state["step"]) if "step" in state else 0 for state in states).float()
        return found


def _norm(gradients: list[torch.Tensor | None]) -> torch.Tensor:
    """Of all of them together, 0-dim."""
    known = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(torch._foreach_norm(known)).norm() if known else torch.zeros(())


def _keep(call: Call, place: int, gradient: torch.Tensor) -> None:
    call.gradients[place] = gradient.detach()


def generator_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_generator(device: torch.device, state: torch.Tensor) -> None:
    torch.set_rng_state(state) if device.type == "cpu" else torch.get_device_module(device).set_rng_state(state, device)
