"""How a script becomes a set of connected processes: the Accelerator, CPU threads, and refused launches."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch.nn.parallel import DistributedDataParallel

from utils.core.errors import FailedElsewhere, LostProcess, UserError, disk_problem, memory_problem, one_line
from utils.core.launcher import (
    asked_threads,
    check_precision,
    lone_process,
    refuse_launch,
    said_while_waiting,
    stop_with_launcher,
)
from utils.core.limits import usable_cores
from utils.core.waiting import LONGEST, Meeting, Waiting

T = TypeVar("T")
_works_alone: ContextVar[str | None] = ContextVar("what this process does just now without the others", default=None)
_MENDABLE, _BROKEN = "1", "2"  # before what a process tells the others: a UserError, or another one


def make_accelerator(
    *,
    mixed_precision: str | None = None,
    gradient_accumulation_steps: int = 1,
    trackers: Sequence[str] = (),
    project_dir: str | None = None,
    cpu_threads: int | None = None,
    collective_timeout: float = 600.0,
    tf32: bool = True,
    cudnn_benchmark: bool = False,
    deterministic: bool = False,
    broadcast_buffers: bool = False,
) -> Accelerator:
    """Returns an Accelerator for one process or DDP.

    On a machine without an accelerator it asks for the CPU itself, because `use_cpu: true` in a config file starts several
    processes but leaves each alone. There it also undoes `accelerate launch`'s own OMP_NUM_THREADS=1: each process has
    `cpu_threads`, else what the user asked for (see `launcher.asked_threads`), else its share of the usable cores.
    `tf32`: fp32 products on a GPU round their factors to 10 bits of mantissa. `cudnn_benchmark`: convolutions take what is
    quickest when their shape is first seen, maybe something else in the next process. `deterministic`: only kernels that add
    up in a fixed order; torch raises RuntimeError where it has none.
    `broadcast_buffers`: DDP copies the main process's buffers to the others, for networks whose training changes them.
    `collective_timeout`: what a lost or hanging peer costs, in seconds (gloo's own: 1800); what one process does while the
    others wait may take longer, see `waited_for`.

    Raises UserError for fp16 on a CPU, an unusable tracker, and for launches other than plain and DDP.
    """
    stop_with_launcher()
    on_cpu = not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    refuse_launch()
    mixed_precision = check_precision(mixed_precision, on_cpu)
    for name in trackers:
        check_tracker(name)
    try:
        accelerator = said_while_waiting(
            lambda: Accelerator(
                cpu=on_cpu,
                mixed_precision=mixed_precision,
                gradient_accumulation_steps=gradient_accumulation_steps,
                project_dir=project_dir,
                kwargs_handlers=[
                    InitProcessGroupKwargs(timeout=timedelta(seconds=collective_timeout)),
                    # Reduced gradients live in the all-reduce buckets: one copy of them less in memory.
                    DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=broadcast_buffers),
                ],
            )
        )
    except torch.distributed.DistStoreError as error:
        raise UserError(
            f"the other processes of WORLD_SIZE={os.environ.get('WORLD_SIZE')} did not come: {one_line(error)}\n"
            "start all of them, or, if no launcher started this one, unset WORLD_SIZE, RANK and MASTER_ADDR"
        ) from None
    if warning := lone_process(accelerator.num_processes, on_cpu):
        print(warning, file=sys.stderr, flush=True)
    if (kind := accelerator.distributed_type.value) != "NO" and not kind.startswith("MULTI_"):  # those are DDP
        raise UserError(
            f"launched with {accelerator.distributed_type.value}, which is not supported: only one process, or DDP\n"
            "launch with --multi_gpu, or without a distributed config"
        )
    if accelerator.num_processes > 1:
        if accelerator.device.type != "cpu":  # each thread has its own current device, and Accelerate was not in this one
            torch.get_device_module(accelerator.device).set_device(accelerator.device)
        waiting = Waiting(accelerator.process_index, accelerator.num_processes, patience=collective_timeout)
        accelerator.waiting = waiting  # type: ignore[attr-defined]  # which other functions of this file ask for
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = cudnn_benchmark and not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads it
    if accelerator.device.type == "cpu":
        torch.set_num_threads(cpu_threads or asked_threads() or max(1, usable_cores() // local_processes(accelerator)))
    return accelerator


def fix_bucket_order(model: torch.nn.Module) -> None:
    """Where `sorts_first`, lets DDP sort its all-reduce buckets before the first update, by the order of the parameters,
    instead of after it, by that of their gradients.

    The order in which gloo and NCCL add up the gradients of 3 processes or more depends on their places in the buckets. These
    would be others in the first update after a resume than in the same update of a run that went on.
    """
    ranks = torch.distributed.get_world_size() if isinstance(model, DistributedDataParallel) else 1
    if ranks > 2 and sorts_first(str(model.device_type)):  # of two numbers the sum has no order
        reducer: Any = model.reducer
        reducer._push_all_rebuilt_params()  # it sorts in the first forward pass, and once only


def sorts_first(device_type: str) -> bool:
    """Whether bits are to be the same after a resume: on CPUs always, else with `deterministic`. The first parameters, whose
    gradients come last, are then sent first, so that a GPU sends nothing while it computes."""
    return device_type == "cpu" or torch.are_deterministic_algorithms_enabled()


def local_processes(accelerator: Accelerator) -> int:
    """Counts the processes of this launch on this machine; where the launcher does not say, all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))


def check_tracker(name: str) -> None:
    """Raises UserError for a tracker that Accelerate does not know, or would silently leave out for want of its package."""
    if name not in LOGGER_TYPE_TO_CLASS:
        raise UserError(f"unknown --logger {name!r}\nchoose from {', '.join(sorted(map(str, LOGGER_TYPE_TO_CLASS)))}, none")
    if name not in [str(tracker) for tracker in get_available_trackers()]:
        raise UserError(f"--logger {name}: its package is not installed\npip install {name}")


def on_main_process(accelerator: Accelerator, what: str, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Calls `function` on the main process alone, for which the others wait; `what` is this work. What fails there fails on
    every rank: as a UserError, which failures to write and memory that runs out become, else as FailedElsewhere."""
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            with _alone(what):
                function(*args, **kwargs)
        except Exception as error:
            failure = _to_tell(error, what)
            if failure is error and isinstance(error, OSError):
                failure = UserError(f"{error.strerror or error}: {error.filename or what}")
                failure.__cause__ = error
    _meet(accelerator, what, failure)


def made_on_main_process(accelerator: Accelerator, what: str, function: Callable[..., T], *args: Any) -> T:
    """Returns on every process what `function` gives on the main one; see `on_main_process`."""
    found: list[T] = []
    on_main_process(accelerator, what, lambda: found.append(function(*args)))
    return from_main_process(found)[0]


def from_main_process(value: T) -> T:
    """Returns the main process's `value`, on all of them. No process may have to wait for it long: see `waited_for`."""
    needs_all("the main process's value")
    with Meeting():
        return broadcast_object_list([value])[0]


def from_all(accelerator: Accelerator, own: torch.Tensor) -> list:
    """Returns the numbers of every process, [processes x len(own)]; the host waits for them."""
    needs_all("the numbers of all processes")
    with Meeting():
        return accelerator.gather(own).tolist()


def objects_from_all(own: list) -> list:
    """Returns what the lists of all processes hold, as one list; in that of one process, what it holds."""
    needs_all("the lists of all processes")
    with Meeting():
        return gather_object(own)


@contextlib.contextmanager
def waited_for(accelerator: Accelerator, what: str) -> Iterator[None]:
    """Around work that some processes may have to do while others wait for them: the main one, say, or one of each machine. All
    leave it together, and what fails on any fails on all of them as in `together`. `what`: the work, for the line that says
    what is waited for. No collective call is to be made inside. Every process must call it."""
    with together(accelerator, what, alike=False):
        yield


@contextlib.contextmanager
def main_process_first(accelerator: Accelerator, what: str) -> Iterator[None]:
    """Around what each process does, the main one before the others: they find the download, say, that it made."""
    with waited_for(accelerator, what):
        if accelerator.is_main_process:
            yield
    with waited_for(accelerator, what):
        if not accelerator.is_main_process:
            yield


def agree(accelerator: Accelerator, what: str, problem: str | None, *, alike: bool = False) -> None:
    """Raises UserError on all processes where one has a `problem`, the first one's. Every process must call it after the work
    `what`, and waits for the others. `alike` as in `together`."""
    _meet(accelerator, what, None if problem is None else UserError(problem), alike=alike)


@contextlib.contextmanager
def together(accelerator: Accelerator, what: str, advice: str = "", *, alike: bool = True) -> Iterator[None]:
    """Around what each process does by itself, without a collective call: what fails on any fails on all of them, so that none
    waits for one that has given up. A full disk becomes a UserError, and memory that runs out one that also says the `advice`;
    what is no UserError is FailedElsewhere on the others. Every process must call it.

    `alike`: all of them work as long, and one that comes a collective timeout later than another hangs.
    """
    failure = None
    try:
        with _alone(what):
            yield
    except Exception as error:
        failure = _to_tell(error, what, advice)
    _meet(accelerator, what, failure, alike=alike)


@contextlib.contextmanager
def _alone(what: str) -> Iterator[None]:
    before = _works_alone.set(what)
    try:
        yield
    finally:
        _works_alone.reset(before)


def needs_all(what: str) -> None:
    """Raises RuntimeError inside `together` and its kin, where other processes would never come; in one process too."""
    if (alone := _works_alone.get()) is not None:
        raise RuntimeError(f"{what} needs all processes, inside {alone!r}, at which each works alone")


def _to_tell(error: Exception, what: str, advice: str = "") -> Exception:
    """A full disk, and memory that ran out, as a UserError, which holds none of what took the memory; any other error as it
    is."""
    if (problem := disk_problem(error, what)) is not None:
        return UserError(problem)
    if (problem := memory_problem(error)) is None:
        return error
    return UserError(f"{problem}; {advice}" if advice else problem)


def _meet(accelerator: Accelerator, what: str, failure: Exception | None, *, alike: bool = False) -> None:
    """Raises on all processes where one has a failure: what no user can mend before what one can, and the first one's."""
    needs_all(what)
    if accelerator.num_processes == 1:
        if failure is not None:
            raise failure
        return
    waiting: Waiting = accelerator.waiting  # type: ignore[attr-defined]  # of make_accelerator
    mine = "" if failure is None else f"{_MENDABLE if isinstance(failure, UserError) else _BROKEN}{failure}"
    if mine.startswith(_BROKEN) and failure is not None:
        mine = f"{_BROKEN}rank {accelerator.process_index}: {one_line(failure)}"
    try:
        told = [each for each in waiting.meet(what, mine, waiting.patience if alike else LONGEST) if each]
    except LostProcess as lost:
        if failure is None:
            raise
        raise failure from lost
    if not told:
        return
    worst = next((each for each in told if each.startswith(_BROKEN)), told[0])
    if failure is not None and (mine == worst or mine[0] == worst[0] == _BROKEN):
        raise failure
    raise (FailedElsewhere if worst[0] == _BROKEN else UserError)(worst[1:])
