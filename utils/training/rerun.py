"""Finished updates are made once more from the state before them, and their bits compared: memory and arithmetic that err."""

import contextlib
import copy
import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from utils.core.digests import digest
from utils.core.distributed import from_all, objects_from_all, sorts_first
from utils.diffusion.objective import Losses
from utils.training.ledger import joined, moved, tensors_of
from utils.training.run import Run

# In the order in which one follows from the other.
STAGES = ("batch", "loss", "own gradient", "gradient", "optimizer", "weights", "ema")
MOST = 4  # times that an update is made, where the first two differ
FAR = 8.0  # times the distance of the others from each other, beyond which a result is not one of them
FAR_OF_RANKS = 0.1  # of a loss or of a gradient's norm, by which no other kernel's rounding moves it


class Execution(NamedTuple):
    """One time that an update was made."""

    digests: list[list[int]]  # [processes x STAGES]
    after: "State"


class Rerun:
    """The loop of a script makes an update again while `again` returns True: from the same state, with the same batches, by
    the same lines. To be called on every process. The copies of the state lie on the host."""

    def __init__(self, run: Run, counters: Sequence[object] = ()):
        """`counters`: see `State`."""
        self._run, self._counters = run, counters
        self._repeats = run.accelerator.device.type == "cpu"  # the same bits each time, unless something errs
        self.repeating = False  # whether the update under way was made before
        self.due = False  # whether the update under way is made again
        self.replaced = False  # whether the newest update is no longer what the first execution made of it
        self._kept: list[dict] = []  # the batches of the update
        self.kept: Iterator[dict] = iter(())  # those of them that an execution has not had yet
        self._seen: dict[str, Tensor] = {}
        self._executions: list[Execution] = []
        self._before: Any = None  # a State
        self._hooks: list[RemovableHandle] = []
        self._eager, self._stance = False, ExitStack()
        # After the first update of a process DDP sorts its buckets; of 3 numbers or more the sum then comes in another order.
        # Some are sorted before (see `fix_bucket_order`).
        sorts = run.accelerator.num_processes > 2 and not sorts_first(run.accelerator.device.type)
        self._unsorted = run.state.step if sorts else None

    def begin(self, step: int, eager: bool = False) -> None:
        """Before the update that follows `step` finished ones, unless it is repeated. `eager`: whether it runs eagerly where
        the network is compiled; then so do its repetitions, for compiled code rounds otherwise."""
        self._eager = eager
        every = self._run.options.rerun_steps
        self.due = every is not None and (step + 1) % every == 0 and step != self._unsorted
        self._seen, self._kept, self._executions, self.replaced = {}, [], [], False
        if self.due:
            self._before = State(self._run, self._counters)
            parameters = [p for p in self._run.objective.network.parameters() if p.requires_grad]
            self._hooks = [p.register_hook(partial(self._add_own, 2 * n + 1)) for n, p in enumerate(parameters)]

    def _add_own(self, weight: int, gradient: Tensor) -> None:
        """Of one micro step, before other ranks' are added to it. In whichever order the parameters come."""
        self._seen["own gradient"] = self._seen.get("own gradient", 0) + weight * digest([gradient])

    def keep(self, batch: dict) -> None:
        """A batch of the loader, of this update."""
        if self.due:
            self._kept.append(batch)

    def add(self, losses: Losses, drawn: dict[str, Tensor]) -> None:
        """What a micro step was of, and what it lost."""
        if self.due:
            for stage, tensors in (("batch", drawn.values()), ("loss", [losses.trained.detach()])):
                self._seen[stage] = digest(tensors) + 3 * self._seen.get(stage, 0)

    def see_gradients(self) -> None:
        """Before the optimizer's step."""
        if self.due:
            gradients = [p.grad for p in self._run.objective.network.parameters() if p.grad is not None]
            self._seen["gradient"] = digest(joined(gradients))

    def again(self) -> bool:
        """Whether the loop is to make the newest update once more: then all is as it was before it."""
        if not self.due:
            return False
        made, digests = self._executions, self._digests()
        alike = [one.after for one in made if one.digests == digests]  # one copy of them is enough
        made.append(Execution(digests, alike[0] if alike else State(self._run, self._counters)))
        if len(made) == 1 or ((made[0].digests != made[-1].digests or len(made) > 2) and len(made) < MOST):
            if len(made) == 1 and self._eager:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._before.restore()
            self._run.state.step -= 1
            self.repeating, self.kept, self._seen = True, iter(self._kept), {}
            return True
        self.repeating = self.due = False
        for hook in self._hooks:
            hook.remove()
        outcome = self._compare() if len(made) > 2 else {"outcome": "same"}
        if outcome["outcome"] != "wrong":
            same = outcome["outcome"] == "same"
            neighbors = self._compare_ranks(exact=same)
            outcome = neighbors if same or neighbors["outcome"] == "ranks differ" else outcome
        if not self.replaced:
            made[0].after.restore_counters()  # what looks at the first time alone has counted then
        self._stance.close()
        self._run.doctor.record(self._run.state.step, {"rerun": outcome})
        if outcome["outcome"] != "same":
            self._run.doctor.look()
        self._executions, self._kept, self._before = [], [], None
        return False

    def _digests(self) -> list[list[int]]:
        """Of each process and stage."""
        device = self._run.accelerator.device
        own = [self._seen[stage] for stage in STAGES[:4]]
        for kind in STAGES[4:]:
            tensors = moved(tensors_of(self._run, kind, all_of_them=True).values(), device)
            own.append(digest(joined(tensors)) if tensors else torch.zeros((), dtype=torch.int64, device=device))
        return from_all(self._run.accelerator, torch.stack([value.to(device) for value in own])[None])

    # ---- what came out of it; the state is that of an execution with which most others agree

    def _compare(self) -> dict[str, Any]:
        """Of an update whose second execution differs from the first."""
        made, apart = self._executions, self._distances()
        places = range(len(made))
        alike = [sum(one.digests == other.digests for other in made) for one in made]
        usual = max(places, key=lambda place: (alike[place], -_nearest(apart, place)))
        if 2 * alike[usual] > len(made) or self._repeats:
            odd = next(place for place in places if made[place].digests != made[usual].digests)
        else:
            ratios = [_ratio(apart, place) for place in places]
            odd = max(places, key=ratios.__getitem__)
            if ratios[odd] <= FAR:
                made[0].after.restore()
                found = {"outcome": "not repeatable", "first": True, "ratio": ratios[odd]}
                return found | _where(made[0].digests, made[1].digests)
        made[usual].after.restore()
        self.replaced = made[usual].digests != made[0].digests
        return {"outcome": "wrong", "first": odd == 0} | _where(made[odd].digests, made[usual].digests)

    def _distances(self) -> list[list[float]]:
        """Of the weights after each execution from each other one, on the rank where they are largest; inf if not finite."""
        weights = [execution.after.weights() for execution in self._executions]
        own = torch.tensor([[0.0 if a is b else _distance(a, b) for b in weights] for a in weights])
        own = own.nan_to_num(torch.inf, posinf=torch.inf).to(self._run.accelerator.device)
        return torch.tensor(from_all(self._run.accelerator, own[None])).amax(0).tolist()

    def _compare_ranks(self, exact: bool) -> dict[str, Any]:
        """A device that errs alike each time is found by another device. `exact`: whether the update is the same each time."""
        run, after = self._run, self._executions[0].after
        ranks, rank = run.accelerator.num_processes, run.accelerator.process_index
        if ranks == 1:
            return {"outcome": "same"}
        everyone = objects_from_all([(model_of(run.accelerator.device), tree_map(_copy, self._kept))])
        found = []
        for other in (rank, (rank - 1) % ranks):
            self._before.restore()
            found.append(self._local(everyone[other][1], other))
        after.restore()
        # Of each rank: of its own batches, then of those of the other; of each of both: of the loss, then of the gradient.
        bits, sizes = (from_all(run.accelerator, torch.stack(each)[None]) for each in zip(*found))
        exact &= len({model for model, _ in everyone}) == 1 and (self._repeats or torch.are_deterministic_algorithms_enabled())
        found = compare_neighbors(bits, sizes, exact)
        return found if found["outcome"] != "not comparable" else found | {"devices": sorted({m for m, _ in everyone})}

    def _local(self, batches: list[dict], rank: int) -> tuple[Tensor, Tensor]:
        """Digests and norms of loss and gradient of these batches of that rank, which no other rank adds to."""
        run, accelerator = self._run, self._run.accelerator
        [model] = accelerator._models
        losses = []
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            for micro_step, batch in enumerate(batches):
                drawn = run.objective.draw(run.data.samples.on_device(batch))
                run.data.samples.seed_dropout(run.state.step - 1, micro_step, rank)
                losses.append(run.objective.losses(model, **drawn).trained)
                accelerator.backward(losses[-1].mean())
        gradients = [p.grad for p in run.objective.network.parameters() if p.grad is not None]
        losses = [loss.detach() for loss in losses]
        found = torch.stack([digest(losses), digest(joined(gradients))])
        # Losses have either sign where their uncertainty is learned, and a sum near 0.
        sizes = torch.stack([get_total_norm(losses), get_total_norm(gradients)])
        model.zero_grad()
        return found, sizes


def compare_neighbors(bits: list, sizes: list, exact: bool) -> dict[str, Any]:
    """What ranks made of their own batches beside what their neighbors made of the same.

    Args:
        bits: [processes x 2 x 2]: of each rank, of its own batches and of those of the rank before it: digests of the loss and
            of the gradient.
        sizes: alike, the norms of the losses and of the gradient.
        exact: whether equal batches must have equal bits. Else kernels may be others on another device (of another model, or
            as cuDNN chooses), and only a difference that no rounding makes is one.
    """
    ranks, unlike = len(bits), False
    suspects: dict[str, list[set[int]]] = {"loss": [], "gradient": []}
    for rank in range(ranks):
        neighbor = (rank + 1) % ranks
        for place, pairs in enumerate(suspects.values()):
            differs = bits[rank][0][place] != bits[neighbor][1][place]
            unlike |= differs
            if differs and (exact or _far(sizes[rank][0][place], sizes[neighbor][1][place])):
                pairs.append({rank, neighbor})
    pairs = suspects["loss"] + suspects["gradient"]
    if not pairs:
        return {"outcome": "not comparable" if unlike else "same"}
    named = set.intersection(*pairs) or set.union(*pairs)
    stage = next(stage for stage, found in suspects.items() if found)
    return {"outcome": "ranks differ", "stage": stage, "ranks": sorted(named), "compared": "bits" if exact else "sizes"}


def _far(a: float, b: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) or math.isfinite(b)  # a loss that diverged did so on both
    return abs(a - b) > FAR_OF_RANKS * min(abs(a), abs(b))


def model_of(device: torch.device) -> str:
    """What two devices must share for their kernels to be the same."""
    if device.type != "cpu":
        module = getattr(torch, device.type)
        return f"{module.get_device_name(device)} {getattr(module, 'get_device_capability', lambda _: '')(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} {torch.get_num_threads()} threads"
    return f"{platform.processor()} {torch.get_num_threads()} threads"


class State:
    """A copy of all that an update changes, but `run.state.step`: on the host, the weights, the averages and the state of the
    optimizer and of the scaler; and `counters`, the attributes of all other objects that an update leaves changed."""

    def __init__(self, run: Run, counters: Sequence[object]):
        self._run = run
        self._tensors = {
            kind: {name: _copy(tensor) for name, tensor in tensors_of(run, kind, all_of_them=True).items()}
            for kind in ("weights", "ema")
        }
        self._optimizers = [
            {parameter: {key: _copy(value) for key, value in state.items()} for parameter, state in optimizer.state.items()}
            for optimizer in run.accelerator._optimizers
        ]
        scaler = run.accelerator.scaler
        self._scaler = None if scaler is None else copy.deepcopy(scaler.state_dict())
        self._counters = [(each, {name: _held(value) for name, value in vars(each).items()}) for each in counters]

    def weights(self) -> list[Tensor]:
        return list(self._tensors["weights"].values())

    @torch.no_grad()
    def restore(self) -> None:
        run = self._run
        for kind, tensors in self._tensors.items():
            for name, tensor in tensors_of(run, kind, all_of_them=True).items():
                tensor.copy_(tensors[name])
        for optimizer, kept in zip(run.accelerator._optimizers, self._optimizers):
            for parameter in [parameter for parameter in optimizer.state if parameter not in kept]:
                del optimizer.state[parameter]  # it came with this update
            for parameter, state in kept.items():
                _restore(optimizer.state[parameter], state, parameter.device)
        if self._scaler is not None:
            run.accelerator.scaler.load_state_dict(self._scaler)
        self.restore_counters()

    def restore_counters(self) -> None:
        for each, values in self._counters:
            vars(each).update({name: _held(value) for name, value in values.items()})


def _held(value: Any) -> Any:
    """As it is now, whatever is done to it later; what belongs to others is not copied."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _restore(state: dict, kept: dict, device: torch.device) -> None:
    for key in [key for key in state if key not in kept]:
        del state[key]
    for key, value in kept.items():
        there = state.get(key)
        if isinstance(there, Tensor):
            there.copy_(value)
        else:
            state[key] = value.to(device) if isinstance(value, Tensor) else value


def _where(found: list[list[int]], usual: list[list[int]]) -> dict[str, Any]:
    """The first stage at which two executions differ, and the ranks that do."""
    for place, stage in enumerate(STAGES):
        ranks = [rank for rank, (a, b) in enumerate(zip(found, usual)) if a[place] != b[place]]
        if ranks:
            return {"stage": stage, "ranks": ranks}
    return {"stage": STAGES[-1], "ranks": []}


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The L2 norm of the difference."""
    return sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b)) ** 0.5


def _nearest(apart: list[list[float]], place: int) -> float:
    return min(apart[place][other] for other in range(len(apart)) if other != place)


def _ratio(apart: list[list[float]], place: int) -> float:
    """The distance of that one from the nearest other, over the largest of the others from each other."""
    others = [other for other in range(len(apart)) if other != place]
    between = [apart[a][b] for a in others for b in others if a != b]
    if min(between) == torch.inf:
        return 0.0  # no two are finite: an update that diverged
    nearest = _nearest(apart, place)
    return nearest / max(*between, 1e-300) if nearest < torch.inf else torch.inf
