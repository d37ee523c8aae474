"""Records, identifies and judges the updates of a loop that says what it does, and what it is to do."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steady_doctor.declare.declaration import Declaration
from steady_doctor.found import Found
from steady_doctor.identify.digest import digests
from steady_doctor.identify.levels import identify_levels
from steady_doctor.identify.step import identify
from steady_doctor.laws import judge
from steady_doctor.record.driven import Driven
from steady_doctor.record.ranks import Ranks
from steady_doctor.record.recorded import Recorded
from steady_doctor.seen import Seen

GROWS = 1.1  # times as many noise levels as were looked at, until they are looked at again: all of them are sorted


class DeclaredDoctor:
    """`session` is to be told of each update; see `Driven`. `findings` may be asked at any time.

    Args:
        network, averaged, averages: see `Driven`.
        stopped: called with an error of the doctor's, which ends the recording and does not reach the loop.
    """

    def __init__(
        self,
        declaration: Declaration,
        optimizer: Optimizer,
        network: nn.Module,
        averaged: nn.Module,
        averages: Mapping[str, Mapping[str, Tensor]],
        stopped: Callable[[BaseException], None] = lambda error: None,
    ):
        self.seen = Seen(declared=declaration)
        self._process, self._passes = declaration.process, 0  # micro steps whose noise levels were looked at
        self.ranks = Ranks()
        self.session = Driven(self._look, stopped, optimizer, network, averaged, averages, declaration.averages)

    def install(self) -> ExitStack:
        """Closing the result takes all hooks away."""
        return self.session.install()

    def _look(self, recorded: Recorded) -> None:
        step = identify(recorded)
        self.seen.steps.append(step)
        self.ranks.tell(recorded.update, digests(recorded, step))

    def measured(self) -> list[str]:
        """Returns the stages of which something was measured in the newest recorded update, in the order of an update."""
        if not self.seen.steps:
            return []
        step = self.seen.steps[-1]
        drawn = [(one, one.drawn) for one in step.passes if one.drawn is not None]
        asked = [one.target for one in step.passes if one.target is not None and one.target.kind == "squared"]
        known = {
            "noise": bool(drawn),
            "timestep": any(one.mixture is not None and one.mixture.told for one, _ in drawn),
            "input": any(one.mixture is not None for one, _ in drawn),
            "condition": any(told.conditions and one.conditions.given for one, told in drawn),
            "network": any(told.layers for _, told in drawn),
            "target": any(one.p is not None for one in asked),
            "weight": any(one.slope is not None for one in asked),
            "gradient": step.update.gradient.ratio is not None,
            "optimizer": step.update.optimized is not None and step.update.optimized.off is not None,
            "learning_rate": bool(self.session.history.rates),
            "ema": bool(step.update.named),
            "state": step.update.told is not None,
            "ranks": bool(self.seen.ranks),
        }
        return [stage for stage, is_known in known.items() if is_known]

    def forget(self) -> None:
        """The newest update is no longer what it was when it was seen."""
        self.session.forget()
        if self.seen.steps and self.seen.steps[-1].update.number == self.session.trainings.updates:
            self.seen.steps.pop()
            self.ranks.forget(self.session.trainings.updates)

    def findings(self) -> list[Found]:
        seen, session = self.seen, self.session
        seen.updates, seen.history, seen.followed = session.trainings.updates, session.history, session.followed
        if len(session.levels) > GROWS * self._passes:
            self._passes, sizes = len(session.levels), {len(levels) for levels in session.levels}
            levels = torch.cat(session.levels).cpu().double()
            seen.levels = identify_levels(self._process, levels, sizes.pop() if len(sizes) == 1 else 0)
        self.ranks.collect()
        seen.ranks = self.ranks.everyone
        return judge(seen)
