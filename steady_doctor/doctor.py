"""Records a process's updates, identifies them, and asks the laws."""

from contextlib import ExitStack

from steady_doctor.found import Found
from steady_doctor.identify.digest import digests
from steady_doctor.identify.step import identify
from steady_doctor.laws import judge
from steady_doctor.record.options import Options
from steady_doctor.record.ranks import Ranks
from steady_doctor.record.schedulers import declared
from steady_doctor.record.session import Recorded, Session, wrap
from steady_doctor.seen import Seen


class Doctor:
    """`install` begins; `findings` may be asked at any time, also after the hooks are gone."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.ranks = Ranks()
        self.session = Session(self._look)
        self._options = Options()

    def install(self) -> ExitStack:
        """Closing the result takes all hooks away."""
        hooks = self.session.install()
        self._options.install(hooks, wrap)
        return hooks

    def _look(self, recorded: Recorded) -> None:
        self.seen.options, self.seen.asked_numbers = self._options.values(), self._options.numbers()
        if not self.seen.steps:
            self.seen.predictions, self.seen.alphas_cumprod = declared()
        step = identify(recorded)
        self.seen.steps.append(step)
        self.ranks.tell(recorded.update, digests(recorded, step))

    def findings(self, ended: bool = False) -> list[Found]:
        """`ended`: the script came to its own end."""
        self.seen.updates, self.seen.ended = self.session.updates, ended
        self.seen.begins, self.seen.dataset_rows = self.session.loads.begins, self.session.loads.rows
        self.seen.data_changed = self.session.loads.changed()
        self.ranks.collect()
        self.seen.ranks = self.ranks.everyone
        return judge(self.seen)
