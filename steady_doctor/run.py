"""Runs a script in this interpreter as Python would run it, watches it, and says in the end what was seen."""

import gc
import os
import signal
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from torch.optim.optimizer import register_optimizer_step_pre_hook

from steady_doctor.ending import tell_before_death
from steady_doctor.files import make_folder
from steady_doctor.result import Result

OURS = ("watch_dir", "watch_updates", "fail_on")  # flags that hardly a script has
COULD_NOT = 2  # exit status


class Enough(SystemExit):
    """Ends the script after the updates that were asked for."""

    was_raised = False  # the script may catch it


def watch_script(
    script: Path,
    arguments: list[str],
    folder: Path | None = None,
    *,
    most_updates: int | None = None,
    shows_all: bool = False,
    fail_on: str | None = None,
) -> int:
    """Returns the exit status: that of the script, or of `fail_on`; COULD_NOT after an error that is one clear line.

    Args:
        arguments: of the script.
        folder: for the report and the findings; default: watch/<the script's name>.
        most_updates: ends the script after so many.
        shows_all, fail_on: as `Result` takes them.
    """
    folder = folder or Path("watch") / script.stem
    if not script.is_file():
        return _refuse(f"--watch {script}: no such script\ncheck the path")
    try:
        make_folder(folder)
    except OSError as error:
        return _refuse(f"cannot write to --watch_dir {folder}: {error.strerror or error}\nchoose another --watch_dir")
    passed_on = _passed_on(arguments)
    result = Result(folder, shows_all=shows_all, fail_on=fail_on)
    result.begin()
    if most_updates is not None:
        _end_after(most_updates, result)

    def finish(status: int | None, ended: bool = False) -> int:
        """`status`: None of a signal."""
        result.finish(ended)
        return 0 if status is None else result.status(status)

    tell_before_death(lambda status: finish(status, ended=status == 0))
    gc.freeze()  # what is there before the script: a look at all objects need not go through it
    try:
        status, ended = _run(script, arguments)
    except KeyboardInterrupt:
        finish(None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever waits is told that it was interrupted
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    status = finish(status, ended)
    result.close()
    if passed_on and not result.doctor.seen.steps:
        print(passed_on, file=sys.stderr, flush=True)
    return status


def _refuse(message: str) -> int:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    return COULD_NOT


def _passed_on(arguments: list[str]) -> str:
    """Says which of our flags stand after the script's name: the script gets them, whatever it does with them."""
    names = [word.split("=")[0] for word in arguments]
    ours = dict.fromkeys(name for name in names if name.startswith("--") and name[2:].replace("-", "_") in OURS)
    if not ours or os.environ.get("RANK", "0") != "0":
        return ""
    note = f"note: the script gets {', '.join(ours)}, and the doctor does not: its own flags stand before the script"
    print(note, file=sys.stderr, flush=True)
    return note


def _end_after(most: int, result: Result) -> None:
    """When the next update is about to be made, so that the script has printed and saved what follows the last one."""

    def before_step(*_: object) -> None:
        if result.doctor.session.trainings.updates >= most:
            Enough.was_raised = True
            raise Enough(0)

    register_optimizer_step_pre_hook(before_step)


def _run(script: Path, arguments: list[str]) -> tuple[int, bool]:
    """(exit status, whether it came to its own end)"""
    sys.argv = [str(script), *arguments]
    path = os.path.abspath(script)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    try:
        exec(main.__loader__.source_to_code(Path(path).read_bytes(), path), vars(main))
    except Enough:
        return 0, False
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0, not end.code and not Enough.was_raised
        print(end.code, file=sys.stderr)
        return 1, False
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)  # none of a script that cannot be parsed
        return 1, False
    return 0, not Enough.was_raised
