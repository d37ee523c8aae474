"""Records a process's updates, identifies them, and asks the laws."""

from contextlib import ExitStack

from steady_doctor.found import Found
from steady_doctor.identify.step import identify
from steady_doctor.laws import judge
from steady_doctor.record.recorded import Recorded
from steady_doctor.record.session import Session
from steady_doctor.seen import Seen


class Doctor:
    """`install` begins; `findings` may be asked at any time, also after the hooks are gone."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.session = Session(self._look)

    def install(self) -> ExitStack:
        """Closing the result takes all hooks away."""
        return self.session.install()

    def _look(self, recorded: Recorded) -> None:
        self.seen.steps.append(identify(recorded))

    def findings(self, ended: bool = False) -> list[Found]:
        """`ended`: the script came to its own end."""
        self.seen.updates, self.seen.ended = self.session.updates, ended
        self.seen.history, self.seen.copies = self.session.history, self.session.copies
        return judge(self.seen)
