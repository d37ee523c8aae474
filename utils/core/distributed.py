"""How a script becomes a set of connected processes: the Accelerator, CPU threads, and refused launches."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from safetensors import SafetensorError
from torch.nn.parallel import DistributedDataParallel

from utils.core.errors import FailedElsewhere, UserError, memory_problem, one_line
from utils.core.launcher import asked_threads, check_precision, lone_process, refuse_launch, stop_with_launcher
from utils.core.processors import usable_cores

T = TypeVar("T")

_MESSAGE_BYTES = 500  # of what one process tells the others of its failure

SUPPORTED_LAUNCHES = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_MLU,
}


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
    broadcast_buffers: bool = False,
) -> Accelerator:
    """Returns an Accelerator for one process or DDP.

    On a machine without an accelerator it asks for the CPU itself, because `use_cpu: true` in a config file starts several
    processes but leaves each alone. There it also undoes `accelerate launch`'s own OMP_NUM_THREADS=1, which would leave all
    cores but one idle: `cpu_threads` threads per process, by default what the user asked for (see `launcher.asked_threads`),
    else the usable cores over the processes of this machine.
    `tf32`: fp32 convolutions and matrix products round their factors to 10 bits of mantissa on GPUs that are faster so.
    `cudnn_benchmark`: convolutions on a GPU take the algorithm that is quickest when their shape is first seen, which may be
    another one in the next process. `broadcast_buffers`: DDP copies the main process's buffers to the others before each
    forward pass, for networks whose training changes them; constants need no copies.
    `collective_timeout` is what a lost or hanging peer costs, in seconds, before every process gives up (gloo's own: 1800).

    Raises UserError for fp16 on a CPU, an unusable tracker, and for launches other than plain and DDP
    (FSDP, DeepSpeed, Megatron, TPU, a dynamo backend).
    """
    stop_with_launcher()
    on_cpu = not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    refuse_launch()
    mixed_precision = check_precision(mixed_precision, on_cpu)
    for name in trackers:
        check_tracker(name)
    accelerator = Accelerator(
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
    if warning := lone_process(accelerator.num_processes, on_cpu):
        print(warning, file=sys.stderr, flush=True)
    if accelerator.distributed_type not in SUPPORTED_LAUNCHES:
        raise UserError(
            f"launched with {accelerator.distributed_type.value}, which is not supported: only one process, or DDP\n"
            "launch with --multi_gpu, or without a distributed config"
        )
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = cudnn_benchmark
    if accelerator.device.type == "cpu":
        torch.set_num_threads(cpu_threads or asked_threads() or max(1, usable_cores() // local_processes(accelerator)))
    return accelerator


def fix_bucket_order(model: torch.nn.Module) -> None:
    """Lets DDP on CPUs sort its all-reduce buckets before the first update, by the order of the parameters, instead of after
    it, by that of their gradients.

    The order in which gloo adds up the gradients of 3 processes or more depends on their places in the buckets. These would
    be others in the first update after a resume than in the same update of a run that went on.
    """
    ranks = torch.distributed.get_world_size() if isinstance(model, DistributedDataParallel) else 1
    if ranks > 2 and model.device_type == "cpu":  # of two numbers the sum has no order
        reducer: Any = model.reducer
        reducer._push_all_rebuilt_params()  # it sorts in the first forward pass, and once only


def local_processes(accelerator: Accelerator) -> int:
    """Counts the processes of this launch on this machine; where the launcher does not say, all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))


def check_tracker(name: str) -> None:
    """Raises UserError for a tracker that Accelerate does not know, or would silently leave out for want of its package."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    if name not in LOGGER_TYPE_TO_CLASS:
        raise UserError(f"unknown --logger {name!r}\nchoose from {', '.join(sorted(map(str, LOGGER_TYPE_TO_CLASS)))}, none")
    if name not in [str(tracker) for tracker in get_available_trackers()]:
        raise UserError(f"--logger {name}: its package is not installed\npip install {name}")


def on_main_process(accelerator: Accelerator, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Calls `function` on the main process alone. What fails there fails on every rank: a UserError, which a failure to write
    and memory that runs out become, on all alike; anything else as it is, on the others as FailedElsewhere."""
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            function(*args, **kwargs)
        except OSError as exception:  # a full disk, say
            failure = UserError(f"{exception.strerror or exception}: {exception.filename or function.__name__}")
        except SafetensorError as exception:  # the same, met by its writer
            failure = UserError(f"{exception}: {function.__name__}")
        except Exception as exception:
            failure = _to_tell(exception)
    try:
        told = from_main_process(None if failure is None else (isinstance(failure, UserError), _words(accelerator, failure)))
    except Exception as lost:
        if failure is None:
            raise
        raise failure from lost
    if failure is not None:
        raise failure
    if told is not None:
        mendable, words = told
        raise UserError(words) if mendable else FailedElsewhere(words)


def from_main_process(value: T) -> T:
    """Returns the main process's `value`, on all of them."""
    return broadcast_object_list([value])[0]


def agree(accelerator: Accelerator, problem: str | None) -> None:
    """Raises UserError on all processes where one has a problem: the first one's. Every process must call it."""
    _agree(accelerator, None if problem is None else UserError(problem))


@contextlib.contextmanager
def together(accelerator: Accelerator, advice: str = "") -> Iterator[None]:
    """Around what each process does by itself, without a collective call: what fails on any fails on all of them, so that none
    waits for one that has given up. Memory that runs out becomes a UserError that also says the `advice`; what is no UserError
    is FailedElsewhere on the others. Every process must call it."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = _to_tell(error, advice)
    _agree(accelerator, failure)


def _to_tell(error: Exception, advice: str = "") -> Exception:
    """Memory that ran out as a UserError, which holds none of what took the memory; any other error as it is."""
    if (problem := memory_problem(error)) is None:
        return error
    return UserError(f"{problem}; {advice}" if advice else problem)


def _words(accelerator: Accelerator, failure: Exception) -> str:
    """What the other processes are told of it."""
    return str(failure) if isinstance(failure, UserError) else f"rank {accelerator.process_index}: {one_line(failure)}"


def _agree(accelerator: Accelerator, failure: Exception | None) -> None:
    """Raises on all processes where one has a failure: what no user can mend before what one can, and the first one's."""
    if accelerator.num_processes == 1:
        if failure is not None:
            raise failure
        return
    mine = torch.zeros(1, 1 + _MESSAGE_BYTES, dtype=torch.uint8)  # 0: none; 1: a UserError; 2: another; and the words
    if failure is not None:
        words = _words(accelerator, failure).encode()[:_MESSAGE_BYTES]
        mine[0, 0] = 1 if isinstance(failure, UserError) else 2
        mine[0, 1 : 1 + len(words)] = torch.tensor(list(words), dtype=torch.uint8)
    try:
        rows = accelerator.gather(mine.to(accelerator.device)).cpu()
    except Exception as lost:
        if failure is None:
            raise
        raise failure from lost
    worst = int(rows[:, 0].max())
    if worst == 0:
        return
    if failure is not None and worst == 2 == int(mine[0, 0]):
        raise failure
    first = next(row[1:] for row in rows if row[0] == worst)
    said = bytes(first[first > 0].tolist()).decode(errors="ignore")
    raise UserError(said) if worst == 1 else FailedElsewhere(said)
