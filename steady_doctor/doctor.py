"""Records a process's updates, identifies them, and asks the laws."""

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn
from torch.optim import Optimizer

from steady_doctor.found import Found
from steady_doctor.identify.digest import digests
from steady_doctor.identify.step import identify
from steady_doctor.laws import judge
from steady_doctor.laws.sampler import at, trained_levels
from steady_doctor.record.by_hand import ByHand
from steady_doctor.record.calls import Level
from steady_doctor.record.modules import owner_of
from steady_doctor.record.options import Options
from steady_doctor.record.ranks import Ranks
from steady_doctor.record.recorded import Recorded
from steady_doctor.record.schedulers import declared
from steady_doctor.record.session import Session
from steady_doctor.record.wrapping import wrap
from steady_doctor.seen import Seen


class Doctor:
    """`install` begins; `findings` may be asked at any time, also after the hooks are gone.

    Args:
        looked: called after each recorded update.
        stopped: called with an error of the doctor's, which ends the recording and does not reach the script.
        network: the class of the network, where it is known.
        optimizer: the one that trains it, where it is known.
    """

    def __init__(
        self,
        looked: Callable[[], None] = lambda: None,
        stopped: Callable[[BaseException], None] = lambda error: None,
        network: str = "",
        optimizer: Optimizer | None = None,
    ):
        self.seen = Seen()
        self.ranks = Ranks()
        self.session = Session(self._look, stopped, optimizer, self._levels)
        self._tables: tuple[int, dict] = 0, {}  # of how many steps, and what they say; see `trained_levels`
        self._told, self._begun = network, 0
        self._earlier: list[tuple[Seen, list[Found]]] = []  # trainings that were over when another one began
        self._looked, self._options = looked, Options()

    def install(self) -> ExitStack:
        """Closing the result takes all hooks away."""
        hooks = self.session.install()
        self._options.install(hooks, wrap)
        return hooks

    def _look(self, recorded: Recorded) -> None:
        if self._begun != self.session.begun:
            self._begun = self.session.begun
            self._begin_anew()
        step = identify(recorded)
        if not any(one.mixture for one in step.passes) and not self.seen.mixed() and self.session.trainings.turn():
            return
        by_hand = self.seen.by_hand = isinstance(recorded.optimizer, ByHand)
        self.seen.options, self.seen.asked_numbers = self._options.values(), self._options.numbers()
        self.seen.asked_words = self._options.words()
        if not self.seen.steps:
            self.seen.predictions, self.seen.alphas_cumprod = declared()
            own = "weights written by the script itself, which is not judged"
            self.seen.optimizer = own if by_hand else type(recorded.optimizer).__name__
            self.seen.network = self._told or _class_of(owner_of(recorded.parameters))
        self.seen.steps.append(step)
        self.ranks.tell(recorded.update, digests(recorded, step))
        self._looked()

    def _levels(self, told: dict[str, float]) -> Level | None:
        """See `calls.Levels`."""
        if not told:
            return None
        if self._tables[0] != len(self.seen.steps):
            self._tables = len(self.seen.steps), trained_levels(self.seen)
        called = [one.called for _, one in self.seen.mixed() if one.called is not None]
        for name, table in self._tables[1].items():
            if name in told and (shares := at(table, told[name])) is not None:
                return Level(name, *shares, called[-1].low, called[-1].high, called[-1].channels)
        return None

    def _begin_anew(self) -> None:
        """Another training; what an earlier one of a denoiser showed stays."""
        if self.session.trainings.went_on:  # what seemed to be over is judged anew
            self._earlier.clear()
        elif self.seen.mixed() and self.session.earlier is not None:
            self.seen.updates, self.seen.history, self.seen.copies, self.seen.sampled = self.session.earlier
            self._earlier.append((self.seen, judge(self.seen)))
            self.seen.copies = None  # which knows the weights, and would keep them
        self.session.earlier, self._tables = None, (0, {})
        self.seen, self.ranks = Seen(is_later=bool(self._earlier)), Ranks()

    @property
    def told(self) -> Seen:
        """What there is to say something about: of the latest training of a denoiser."""
        return self._earlier[-1][0] if self._earlier and not self.seen.mixed() else self.seen

    def findings(self, ended: bool = False) -> list[Found]:
        """`ended`: the script came to its own end."""
        found = {one.code: one for _, earlier in self._earlier for one in earlier}
        if self.told is self.seen:
            found |= {one.code: one for one in self._judged(ended) if one.code not in found}
        return list(found.values())

    def _judged(self, ended: bool) -> list[Found]:
        self.seen.updates, self.seen.ended = self.session.trainings.updates, ended
        if ended and self.seen.steps and not self.seen.predictions:  # of a scheduler that has sampled since
            self.seen.predictions = declared()[0]
        self.seen.begins, self.seen.dataset_rows = self.session.loads.begins, self.session.loads.rows
        self.seen.data_changed = self.session.loads.changed()
        self.seen.not_loaded = self.session.not_loaded()
        self.ranks.collect()
        self.seen.ranks = self.ranks.everyone
        self.seen.history, self.seen.copies = self.session.history, self.session.copies
        self.seen.sampled = self.session.calls.steps
        return judge(self.seen)


def _class_of(module: nn.Module | None) -> str:
    return "" if module is None else type(module).__name__
