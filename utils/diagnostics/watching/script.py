"""Runs a script in this interpreter as Python would run it, under the hooks, and says in the end what was seen."""

import gc
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

from utils.core.errors import UserError
from utils.diagnostics.watching.ending import tell_before_death
from utils.diagnostics.watching.hooks import install
from utils.diagnostics.watching.result import Result
from utils.diagnostics.watching.watcher import Enough, Watcher

OURS = Path(__file__).resolve().parents[3]
ALIAS = "steady_diffusion_doctor"  # before the names of our modules, while a script runs that may have some of these names


def watch_script(script: Path, arguments: list[str], result: Result, most_updates: int | None) -> int:
    """Returns the exit status: that of the script, or of --fail_on. Raises UserError where there is no script, and where the
    result cannot be written."""
    if not script.is_file():
        raise UserError(f"--watch {script}: no such script\ncheck the path")
    result.note_passed_on(arguments)
    watcher = Watcher(result.write, most_updates)
    result.begin(watcher)
    hooks = install(watcher)

    def finish(status: int | None, last_look: bool = True, ended: bool | None = None) -> int:
        """`status`: None of a signal. `ended`: by itself; None: where the status is 0."""
        watcher.exit_status = status
        result.finish(watcher, hooks, ended=status == 0 if ended is None else ended, last_look=last_look)
        return 0 if status is None else result.status(watcher, status)

    tell_before_death(finish)
    gc.freeze()  # what is there before the script: no look at all objects goes through it
    try:
        status, ended = _run(script, arguments)
    except KeyboardInterrupt:
        finish(None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever waits is told that it was interrupted
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    return finish(status, ended=ended)


def _run(script: Path, arguments: list[str]) -> tuple[int, bool]:
    """(exit status, whether it came to its own end). Its modules may have the names of ours: ours are put out of its sight."""
    sys.argv = [str(script), *arguments]
    folder = str(script.resolve().parent)
    sys.path[:] = [folder, *(p for p in sys.path if Path(p or ".").resolve() != OURS)]
    for name in [n for n in sys.modules if n.split(".")[0] in ("utils", "models", "diagnose")]:
        module = sys.modules.pop(name)
        module.__name__ = f"{ALIAS}.{name}"
        sys.modules[module.__name__] = module  # torch's compiler imports what a function's module is called
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Enough:
        return 0, False
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0, not end.code
        print(end.code, file=sys.stderr)
        return 1, False
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and Path(trace.tb_frame.f_code.co_filename).resolve() != script.resolve():
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        return 1, False
    return 0, True
