"""Whether the backward pass leaves the slope of the loss: difference quotients, which know nothing of autograd.

The loss changes by <G, o(w + d) - o(w - d)> / 2 when the weights w move by d, where G is the gradient of the loss with respect
to the network's output o. That must be <gradient, d>. A path through the network that gradients do not take shows as well as
gradients that are changed on their way. It takes two forward passes, in float64, with the random numbers of the training.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.overrides import TorchFunctionMode

from utils.diagnostics.audit.declared import Declared
from utils.diagnostics.audit.fitting import simple
from utils.diagnostics.audit.observer import Observer, generator_state, set_generator
from utils.diagnostics.audit.seen import Update, tensors_in
from utils.diagnostics.audit.verdict import Check, not_observed

NAME, WANTED = "gradient of the first backward pass", "the slope of the loss"
MOVED = 1e-5  # share of its size by which a parameter moves, at most: few kinks, as of ReLU, lie in between
# (share of the largest gradient below which that of a parameter is not looked into, what may be off of a parameter's): fp32
# leaves 1e-6 of the second, bf16 0.004 in the middle and 0.017 at most, of 102 looks at networks of 114 and 144 parameters.
EXACT, ROUGH = (1e-3, 1e-3), (0.1, 0.05)
LEARNED = 5  # updates after which a network uses all of its parts
SMALLEST = 1e-2  # size that is taken for parameters that are zero


class _Wide(TorchFunctionMode):
    """Keeps in float64 what layers turn into fp32, and draws the random numbers of dropout as in fp32."""

    def __torch_function__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        options, value = options or {}, arguments[0] if arguments else None
        if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
            to_fp32 = function is torch.Tensor.to and torch.float32 in (*arguments[1:], *options.values())
            if function is torch.Tensor.float or to_fp32:
                return value
            if function is F.dropout:
                return value * function(torch.ones_like(value, dtype=torch.float32), *arguments[1:], **options).double()
        return function(*arguments, **options)


@contextlib.contextmanager
def _as_it_was(observer: Observer, randomness: torch.Tensor) -> Iterator[None]:
    """The network and torch's random numbers as in the pass that was seen, and after it as before."""
    network = observer.modules["network"]
    norms = [m for m in network.modules() if isinstance(m, _SpectralNorm) and m.training]
    now = generator_state(observer.device)
    try:
        for norm in norms:
            norm.eval()  # its vectors are those of the pass, and no part of the slope
        set_generator(observer.device, randomness)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), _Wide():
            yield
    finally:
        for norm in norms:
            norm.train()
        set_generator(observer.device, now)


class _Quotients:
    """Of one update's first micro step."""

    def __init__(self, update: Update, observer: Observer, gradient: torch.Tensor):
        """`gradient` [n]: float64, the one seen, sampled."""
        self._call, self._observer = update.micro_steps[0].calls["network"], observer
        tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        exact = self._call.autocast is None and not (tf32 and gradient.device.type == "cuda")
        room, self.tolerance = EXACT if exact else ROUGH
        self._state = {name: t.double() if t.is_floating_point() else t for name, t in update.network.items()}
        self._inputs = [_wide(value) for value in self._call.inputs]
        self._sample = sample = observer.sample
        self._off = 0.0  # how far the output was from the one seen
        self.gradients = gradient.split(sample.counts)
        self.names = [name for name, part in zip(sample.names, self.gradients) if len(part)]
        values = sample.take(self._state[name] for name in sample.names).double().split(sample.counts)
        sizes = torch.stack([value.square().mean().sqrt().clamp(min=SMALLEST) for value in values])
        norms = torch.stack([part.norm() for part in self.gradients])
        self._floors = norms + room * norms.max().clamp(min=1e-30)
        self._change = float((MOVED * sizes * self._floors).min())  # of the loss, by each parameter alone
        self._generator = torch.Generator().manual_seed(update.step)

    def off(self, chosen: set[str]) -> tuple[float, float, float]:
        """(how far the two sides are apart, in shares of one parameter's gradient; <gradient, d>; the quotient), for a random
        direction d of the parameters `chosen`."""
        directions = {}
        for name, part, floor in zip(self._sample.names, self.gradients, self._floors.tolist()):
            if name in chosen:
                signs = torch.randint(2, part.shape, generator=self._generator).to(part) * 2 - 1
                directions[name] = signs * (self._change / floor)
        seen = sum(float(part @ directions[name]) for name, part in zip(self._sample.names, self.gradients) if name in chosen)
        slope = (self._loss(directions, 1.0) - self._loss(directions, -1.0)) / 2
        return abs(slope - seen) / self._change / len(directions) ** 0.5, seen, slope

    def _loss(self, directions: dict[str, torch.Tensor], sign: float) -> float:
        moved = {}
        for name, stride in zip(self._sample.names, self._sample.strides):
            if name in directions:
                flat = self._state[name].reshape(-1).clone()
                flat[::stride] += sign * directions[name]
                moved[name] = self._state[name].clone().copy_(flat.view_as(self._state[name]))  # in its own memory layout
        outputs = self._outputs(moved, self._inputs)
        total = 0.0
        for place, gradient in self._call.gradients.items():
            self._off = max(self._off, _distance(outputs[place], self._call.outputs[place]))
            total += float((outputs[place] * gradient.double()).sum())
        return total

    def _outputs(self, moved: dict[str, torch.Tensor], inputs: list) -> tuple[torch.Tensor, ...]:
        with _as_it_was(self._observer, self._call.randomness):
            network = self._observer.modules["network"]
            return tensors_in(torch.func.functional_call(network, self._state | moved, tuple(inputs)))

    def of_other_labels(self) -> bool | None:
        """Whether the outputs are others with the labels of the next images; None without labels, or where they are alike."""
        places = [k for k, value in enumerate(self._inputs) if k > 1 and isinstance(value, torch.Tensor) and value.ndim == 1]
        others = [value.roll(-1) if k in places else value for k, value in enumerate(self._inputs)]
        if not any((self._inputs[k] != others[k]).any() for k in places):
            return None
        pairs = zip(self._outputs({}, self._inputs), self._outputs({}, others))
        return any(bool((one != other).any()) for one, other in pairs)

    @property
    def another(self) -> bool:
        """Whether the network gives other outputs than those seen: it cannot be asked again."""
        return self._off > (0.02 if self.tolerance < ROUGH[1] else 0.2)


def _distance(found: torch.Tensor, seen: torch.Tensor) -> float:
    seen = seen.double()
    return float((found - seen).norm() / seen.norm().clamp(min=1e-30))


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check_slopes(update: Update, declared: Declared, observer: Observer, loss_scale: float = 1.0) -> list[Check]:
    """Whether the first backward pass left the slope of the loss; where not, in which parameters."""
    step = update.micro_steps[0] if update.micro_steps else None
    if update.not_asked:
        return [not_observed("gradient", NAME, WANTED, update.not_asked)]
    if update.network is None or step is None or step.gradient_after is None or not step.calls["network"].gradients:
        return []
    seen = step.gradient_after.double() - (0.0 if step.gradient_before is None else step.gradient_before.double())
    if declared.l1_weight:  # the penalty is no part of the output
        penalized = {id(p) for p in observer.averaged_module.parameters() if p.ndim > 1}
        matrices = observer.sample.per_element(id(p) in penalized for p in observer.parameters.values())
        weights = observer.sample.take(update.network[name] for name in observer.sample.names).double()
        seen = seen - matrices * weights.sign() * declared.l1_weight / declared.micro_steps * loss_scale
    if not torch.isfinite(seen).all():
        return [not_observed("gradient", NAME, WANTED, "gradients are not finite")]
    quotients = _Quotients(update, observer, seen)
    try:
        off, _, _ = quotients.off(set(quotients.names))
    except (RuntimeError, MemoryError) as error:  # a kernel without float64, or too little memory
        return [not_observed("gradient", NAME, WANTED, (str(error) or type(error).__name__).splitlines()[0])]
    if quotients.another:
        return [not_observed("gradient", NAME, WANTED, "the network gives something else when it is asked again")]
    fine = off <= quotients.tolerance
    checks = [Check("gradient", NAME, WANTED, f"off by {off:.1e}", fine, "" if fine else _explain(quotients))]
    # A fresh network's embeddings may be scaled by zero, until some updates have moved that: if they reach it.
    learns = fine and update.optimizer_step is not None and bool(update.optimizer_step.gradient.any())
    asks = declared.class_conditional and update.step >= LEARNED and learns
    if asks and (used := quotients.of_other_labels()) is not None:
        text = "the network's output does not depend on the label"
        found = "others" if used else "the same"
        checks.append(Check("condition", "output for another label", "another one", found, used, text))
    return checks


def _explain(quotients: _Quotients) -> str:
    parts: dict[str, set[str]] = {}
    for name in quotients.names:
        block = ".".join(name.removeprefix("unet.").split(".")[:2])
        parts.setdefault(block, set()).add(name)
    wrong = {block: off for block, names in parts.items() if (off := quotients.off(names)[0]) > quotients.tolerance}
    said = f"the backward pass leaves another gradient than the slope of the loss in {len(wrong)} of {len(parts)} parts"
    if not wrong:
        return said
    worst = parts[max(wrong, key=lambda block: wrong[block])]
    name = max(worst, key=lambda name: quotients.off({name})[0])
    (_, *first), (_, *second) = quotients.off({name}), quotients.off({name})
    ratios = [seen / slope if slope else 0.0 for seen, slope in (first, second)]
    how = "something else"
    if not any(seen for seen, _ in (first, second)):
        how = "zero"
    elif abs(ratios[0] - ratios[1]) < 2 * quotients.tolerance * abs(ratios[0]):
        how = f"{simple(ratios[0])} times it"
    return f"{said} of the network, such as {name}: {how}"
