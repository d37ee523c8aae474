"""The one exception for mistakes that a user can mend, and what is said when memory runs out."""

import contextlib
import errno
import textwrap
from collections.abc import Callable, Iterator

OUT_OF_MEMORY = "out of memory"
MEMORY_RAN_OUT = (  # as libraries put it where they raise no OutOfMemoryError
    "can't allocate memory",  # torch's allocator on a CPU
    OUT_OF_MEMORY,
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_GENERAL_ADVICE = (
    "try a smaller --train_batch_size with more --gradient_accumulation_steps, "
    "--gradient_checkpointing, or --mixed_precision bf16"
)
_WORKERS = "a process that reads images ended: {}\nif memory, /dev/shm or open files are short, set a smaller " + (
    "--dataloader_num_workers, or 0"
)
_SHORT = dict.fromkeys(("DataLoader worker", "Communication with the workers", "items of ancdata"), _WORKERS) | {
    "can't start new thread": "{}\nraise `ulimit -u`, or the limit of processes of the container"
}
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)  # what a user can mend
_explain: Callable[[], str] | None = None


class UserError(Exception):
    """Ends a script with its message as one clear line and exit status 2: see `entrypoint.run_script`."""


class FailedElsewhere(Exception):
    """Something that the processes do together failed on another one, which says why."""


class LostProcess(Exception):
    """A process for which this one waited has ended, or hangs: one clear line, and the exit status of a crash."""


def one_line(error: BaseException) -> str:
    """Returns what an error says, for a message: of one that is not a UserError with its type, which often says more."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def explained(what: str, advice: str, kinds: type[Exception] | tuple[type[Exception], ...] = Exception) -> Iterator[None]:
    """Turns an exception of these `kinds` inside the block into a UserError: `what` failed, why, and below it the `advice`."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise UserError(f"{what}: {reason}\n{advice}") from error


def in_full(error: BaseException) -> str:
    """Returns what somebody else's exception says, in one line: its own words and, in brackets, those of its last cause. The
    first line of a library's message often says only that something failed."""
    last = error
    while cause := last.__cause__ or (None if last.__suppress_context__ else last.__context__):
        last = cause
    text = textwrap.shorten(str(error), 400, placeholder=" ...") or type(error).__name__
    reason = textwrap.shorten(one_line(last), 200, placeholder=" ...")
    return text if last is error or " ".join(str(last).split()) in text else f"{text} ({reason})"


def shortage(error: Exception) -> UserError | None:
    """For what is said where a machine gives no more, wherever the process is then: a full disk; torch's handler of signals
    tells of a lost worker of a loader. None for other errors, of a worker, too."""
    if problem := disk_problem(error):
        return UserError(problem)
    found = [said for words, said in _SHORT.items() if words in str(error) and not str(error).startswith("Caught ")]
    return UserError(found[0].format(one_line(error))) if found else None


def out_of_memory(error: Exception) -> bool:
    """Returns whether `error` says that memory ran out, on an accelerator or on a CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_RAN_OUT)


def disk_problem(error: Exception, what: str = "") -> str | None:
    """Returns one line about a disk that is full or must not be written; None for any other error. `what` was being done: it
    stands there if the error names no file."""
    if isinstance(error, OSError) and error.errno in OF_THE_DISK:  # of a copy, the second file is the new one
        return ": ".join(filter(None, (error.strerror, str(error.filename2 or error.filename or what))))
    _, of_disk, reason = str(error).partition("I/O error: ")
    if of_disk and type(error).__name__ == "SafetensorError":  # the same, met by its writer
        return ": ".join(filter(None, (reason, what)))
    return None


@contextlib.contextmanager
def written(what: str) -> Iterator[None]:
    """Turns a problem with the disk inside the block into a UserError, a line that names `what` if nothing else is named."""
    try:
        yield
    except Exception as error:
        if problem := disk_problem(error, what):
            raise UserError(problem) from None
        raise


def memory_problem(error: Exception) -> str | None:
    """Returns one line about memory that ran out; None for any other error."""
    if not out_of_memory(error):
        return None
    return f"{OUT_OF_MEMORY} ({(str(error).strip() or type(error).__name__).splitlines()[0][:200]})"


def explain_out_of_memory(explain: Callable[[], str] | None) -> None:
    """From here on `explain()` says, once memory has run out, what was asked and what to do; None: general advice alone."""
    global _explain
    _explain = explain


def memory_advice() -> str:
    """Returns the lines that follow the message about memory that ran out."""
    try:
        return _explain() if _explain is not None else _GENERAL_ADVICE
    except Exception:  # the first error matters, not one about its explanation
        return _GENERAL_ADVICE
