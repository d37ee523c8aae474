"""How a script's process ends: its exit status, and what is said, once, of what went wrong."""

import contextlib
import importlib.util
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from utils.core.bars import Bar
from utils.core.errors import OUT_OF_MEMORY, FailedElsewhere, LostProcess, UserError, memory_advice, out_of_memory, shortage
from utils.core.files import make_folder
from utils.core.launcher import in_thread, launcher_reports, launcher_words

if sys.platform == "win32":  # which lacks SIGUSR1 and the module `resource`, and was never tried
    print("error: Windows is not supported: use Linux, or WSL 2", file=sys.stderr)
    sys.exit(2)
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else C++ stacks hide the line about a process that is lost
T = TypeVar("T")
REQUIRED = (  # to import, of requirements.txt; trackers are asked for by --logger
    *("torch", "accelerate", "diffusers", "datasets", "huggingface_hub", "safetensors", "yaml", "psutil", "tqdm", "PIL"),
    *("numpy", "sklearn", "filelock", "jinja2"),
)
LAUNCHER_NEXT = "(the text below is from the launcher: you can ignore it)"
LAUNCHER_BESIDE = "(you can ignore the traceback of the launcher)"  # which ends at the same signal
WAIT_FOR_FIRST = 5.0  # seconds, in which a launcher ends the other ranks
PATIENCE = 5.0  # seconds, in which whoever counts what the ranks say answers, unless it hangs
_at_end: list[Callable[[int], None]] = []
said_of_launcher: set[str] = set()  # once is enough, and the run's own line then is the last one
_imports = contextlib.ExitStack()  # says that they take long


def run_script(
    main: Callable[[Any], int | None], parse_args: Callable[[], Any], crash_status: int = 1, *, outlives_output: bool = False
) -> None:
    """Calls `main(parse_args())` and ends the process with its status.

    `outlives_output`: what cannot be printed is lost and ends nothing, for work that is kept in files.

    A UserError becomes one line on stderr and status 2. Any other exception ends with `crash_status`: a LostProcess with one
    line, memory that ran out with one message of the first rank that met it, the rest with their traceback.
    """
    _imports.close()
    sys.excepthook = _tell_of_interrupt
    # diffusers passes this argument, and huggingface_hub complains about it: nothing that a user can change
    warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument")
    # Accelerate hands this argument to torch 2.13, whose new name for it means another thing
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    if outlives_output:
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - for a stream that was closed from the start
        sys.stdout, sys.stderr = LossyOutput(sys.stdout or nowhere), LossyOutput(sys.stderr or nowhere)
    try:
        options = parse_args()
        leave_progress_to_us(options)
        use_a_cache_that_can_be_written(options)
        status = main(options)
        if status and not said_of_launcher and os.environ.get("RANK", "0") == "0" and launcher_reports():  # a stopped run, say
            _say_last(LAUNCHER_NEXT)
    except UserError as error:
        status = _tell(error)
    except FailedElsewhere:
        status = crash_status
        time.sleep(WAIT_FOR_FIRST)  # a rank that ended before the one that says why would have it killed unheard
    except LostProcess as error:
        status = crash_status
        if not _was_said(OUT_OF_MEMORY) and _first_to_say(str(error)):  # else that is why it was lost
            _say_last(f"error: {error}")
    except Exception as error:
        status = crash_status
        if out_of_memory(error):
            if _first_to_say(OUT_OF_MEMORY):
                what = (str(error) or type(error).__name__).splitlines()[0]
                rank = os.environ.get("RANK", "0")
                _say_last(f"error: {OUT_OF_MEMORY} on rank {rank}: {what}\n{memory_advice()}\ncheckpoints are whole")
        elif short := shortage(error):
            status = _tell(short)
        elif not _was_said(OUT_OF_MEMORY):  # else that is why this rank lost its peer
            traceback.print_exc()
    _leave(status)


def _tell_of_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C in what handles no signals, such as imports, is no crash: one line, and Python's own status of it."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        _say_last("\nstopped by Ctrl-C" + f"\n{LAUNCHER_BESIDE}" * bool(launcher_words()))


class LossyOutput:
    """A text stream that loses what nobody takes: the reader of a pipe is gone (`tee` after Ctrl-C), or a disk is full."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._stream, name)


def at_end(function: Callable[[int], None]) -> None:
    """Has `function` called with the exit status when this process ends by `run_script`, or by `leave_now`."""
    _at_end.append(function)


def leave_now(status: int) -> NoReturn:
    """Ends the process at once, also from within a signal's handler."""
    _call_at_end(status)
    os._exit(status)


def _call_at_end(status: int) -> None:
    for function in _at_end:
        with contextlib.suppress(OSError):
            function(status)


def parse_early(parse_args: Callable[[], T], nothing_to_do: Callable[[T], str | None] = lambda options: None) -> T:
    """The options of this process's command line, asked for above the heavy imports of a script: --help, a mistake and missing
    packages are not to wait for these. Where `nothing_to_do` gives a line, it is printed, and the process ends with status
    0."""
    sys.excepthook = _tell_of_interrupt
    try:
        options = parse_args()
        if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
            raise UserError(f"not installed: {', '.join(missing)}\npip install -r requirements.txt")
        line = nothing_to_do(options)
        if line is None:
            use_a_cache_that_can_be_written(options)
    except UserError as error:
        _leave(_tell(error))
        raise
    if line is not None:
        if os.environ.get("RANK", "0") == "0":
            print(line)
        _leave(0)
    leave_progress_to_us(options)
    _imports.enter_context(loading_libraries(options))
    return options


def loading_libraries(options: Any) -> Bar:
    """For a `with` block of imports: they take long on a slow disk."""
    shown = not getattr(options, "quiet", False) and os.environ.get("RANK", "0") == "0"
    return Bar("loading the libraries", shown=shown)


def use_a_cache_that_can_be_written(options: Any) -> None:
    """Before these libraries are imported: where the folder of `datasets` cannot be made or written, what they write goes
    below --cache_dir, or beside --output_dir, or into a temporary folder, and that is said once. Temporary files go beside
    --output_dir where the machine has no place for them. Raises UserError for a --cache_dir that cannot be made."""
    beside = os.path.join(os.path.dirname(os.path.abspath(getattr(options, "output_dir", None) or "here")), ".cache")
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # torch cannot be imported then
        make_folder(Path(beside), "TMPDIR")
        os.environ["TMPDIR"] = tempfile.tempdir = beside
    asked = getattr(options, "cache_dir", None)
    if asked and not os.path.isdir(asked):  # packed images can be read where nothing can be written
        make_folder(Path(asked), "--cache_dir")
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")
    home = os.path.expandvars(os.path.expanduser(os.environ.get("HF_HOME") or default))
    usual = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    if _can_be_written(usual):
        return
    places = [asked or beside, os.path.join(tempfile.gettempdir(), f"steady-diffusion-{os.getuid()}")]
    below = Path(next(filter(_can_be_written, places), places[0])).absolute()
    os.environ["HF_DATASETS_CACHE"] = str(below / "huggingface" / "datasets")
    if not _can_be_written(home) and not os.path.isdir(os.path.join(home, "hub")):  # else what was downloaded can be read there
        os.environ["HF_HOME"] = str(below / "huggingface")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(below / "torchinductor"))  # torch asks for the user's name
    if os.environ.get("RANK", "0") == "0" and not getattr(options, "quiet", False):
        print(f"note: {usual} cannot be written; the cache is {below} (--cache_dir or HF_HOME choose)", file=sys.stderr)


def _can_be_written(folder: str) -> bool:
    if folder.startswith("~"):  # which nobody has who has no name
        return False
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        return os.access(folder, os.W_OK)
    return False


def leave_progress_to_us(options: Any) -> None:
    """Other libraries show no bars in logs or with --quiet. Before these are imported; what the user has set wins."""
    if getattr(options, "quiet", False) or not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")


def _tell(error: UserError) -> int:
    """Says it, once among all ranks. Returns the exit status."""
    if _first_to_say(str(error)):
        _say_last(f"error: {error}" + f"\n{LAUNCHER_NEXT}" * launcher_reports())
    return 2


def _leave(status: int | None) -> None:
    _call_at_end(status or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Without ceremony: freeing a process group joins threads that may wait for Python's lock, which is held meanwhile, or
        # for a peer that is gone. torch's registry keeps the groups alive up to here, because nobody destroys them.
        os._exit(status or 0)
    sys.exit(status)


def _first_to_say(message: str) -> bool:
    """Whether no other rank has said this. Whoever meets an error first says it: the launcher ends the others soon after."""
    said = _times_said(message, adding=1)
    if said is not None:
        return said <= 1
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return True
    # Not connected yet: the first rank meets the same error. A rank that ended before it would have it killed unheard.
    if launcher_words():
        time.sleep(WAIT_FOR_FIRST)
        return True  # nobody has ended this process meanwhile, so nobody else has said it
    return False


def _was_said(message: str) -> bool:
    return bool(_times_said(message, adding=0))


def _times_said(message: str, adding: int) -> int | None:
    """By all ranks together; None where they are not connected, 0 where whoever kept the count is gone or hangs."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    try:
        return within(PATIENCE, lambda: dist.distributed_c10d._get_default_store().add(f"said: {message}", adding))
    except Exception:
        return 0


def _say_last(message: str) -> None:
    shown = getattr(sys.modules.get("tqdm"), "tqdm", None)
    for bar in list(getattr(shown, "_instances", ())):  # else the message stands behind a bar
        bar.close()
    print(message, file=sys.stderr, flush=True)


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns `call()`, or raises what it raises, or TimeoutError once it has taken so long; its thread stays behind. torch's
    store waits for ever for one whose process is stopped, whatever its own timeout is."""
    return in_thread(call).result(seconds)
