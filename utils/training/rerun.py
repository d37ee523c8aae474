"""Finished updates are made once more from the state before them, and their bits compared: memory and arithmetic that err."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from utils.core.digests import digest
from utils.core.distributed import from_all, sorts_first
from utils.diffusion.objective import Losses
from utils.training.ledger import hash_of, tensors_of
from utils.training.run import Run

# In the order in which one follows from the other.
STAGES = ("batch", "loss", "own gradient", "gradient", "optimizer", "weights", "ema")
MOST = 3  # times that an update is made, where the first two differ


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
            self._seen["gradient"] = hash_of(gradients, self._run.accelerator.device)

    def again(self) -> bool:
        """Whether the loop is to make the newest update once more: then all is as it was before it."""
        if not self.due:
            return False
        made, digests = self._executions, self._digests()
        alike = [one.after for one in made if one.digests == digests]  # one copy of them is enough
        made.append(Execution(digests, alike[0] if alike else State(self._run, self._counters)))
        if len(made) == 1 or (len(made) < MOST and made[0].digests != digests):
            if len(made) == 1 and self._eager:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._before.restore()
            self._run.state.step -= 1
            self.repeating, self.kept, self._seen = True, iter(self._kept), {}
            return True
        self.repeating = self.due = False
        for hook in self._hooks:
            hook.remove()
        outcome = self._judged()
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
        own += [hash_of(tensors_of(self._run, kind, all_of_them=True).values(), device) for kind in STAGES[4:]]
        return from_all(self._run.accelerator, torch.stack([value.to(device) for value in own])[None])

    def _judged(self) -> dict[str, Any]:
        """Of the executions: that most agree, which one does not and where, or that each has other bits. The state is then that
        of one that agrees with another, or of the first."""
        made = self._executions
        if len(made) < MOST:
            return {"outcome": "same"}
        usual = next((one for one in made if sum(one.digests == other.digests for other in made) > 1), None)
        if usual is None:
            made[0].after.restore()
            return {"outcome": "not repeatable"} | _where(made[0].digests, made[1].digests)
        odd = next(one for one in made if one.digests != usual.digests)
        usual.after.restore()
        self.replaced = odd is made[0]
        return {"outcome": "wrong", "first": self.replaced} | _where(odd.digests, usual.digests)


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
