"""How a script becomes a set of connected processes: the Accelerator, CPU threads, and refused launches."""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    InitProcessGroupKwargs,
    broadcast_object_list,
)

from utils.errors import UserError

# What a lost peer costs before every process gives up. gloo's own default is 30 minutes.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)

SUPPORTED_LAUNCHES = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_MLU,
}


def usable_cores() -> int:
    """Cores that this process may run on, which a container or `taskset` can make fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_accelerator(
    *,
    mixed_precision: str | None = None,
    gradient_accumulation_steps: int = 1,
    log_with=None,
    project_dir: str | None = None,
    cpu_threads: int | None = None,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> Accelerator:
    """An Accelerator for one process or DDP.

    On a machine without an accelerator it asks for the CPU itself, because `use_cpu: true` in a config file starts several
    processes but leaves each alone. There it also undoes `accelerate launch`'s OMP_NUM_THREADS=1, which would leave all
    cores but one idle: `cpu_threads` threads per process, by default the usable cores over the processes of this machine.

    Raises UserError for fp16 on a CPU, an unusable tracker, and for launches other than plain and DDP
    (FSDP, DeepSpeed, Megatron, TPU).
    """
    on_cpu = not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    mixed_precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")  # what `accelerate launch` was given
    if on_cpu and mixed_precision == "fp16":
        raise UserError("--mixed_precision fp16 needs a GPU; on a CPU use no or bf16")
    if log_with is not None:
        check_tracker(log_with)
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=gradient_accumulation_steps,
        log_with=log_with,
        project_dir=project_dir,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timeout),
            # Gradients live in the all-reduce buckets: one copy of them less in memory.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    if accelerator.distributed_type not in SUPPORTED_LAUNCHES:
        raise UserError(
            f"launched with {accelerator.distributed_type.value}, but exact EMA and checkpoints here are for one process "
            "or DDP; launch with --multi_gpu or without a distributed config"
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise UserError("leave the launcher's dynamo_backend at no and use --compile: it keeps the names of the weights clean")
    if accelerator.device.type == "cpu":
        local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        torch.set_num_threads(cpu_threads or max(1, usable_cores() // local_processes))
    return accelerator


def check_tracker(name: str) -> None:
    """Raises UserError for a tracker that Accelerate does not know, or would silently leave out for want of its package."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    if name not in LOGGER_TYPE_TO_CLASS:
        raise UserError(f"unknown --logger {name!r}; choose from {', '.join(sorted(map(str, LOGGER_TYPE_TO_CLASS)))}")
    if name not in [str(tracker) for tracker in get_available_trackers()]:
        raise UserError(f"--logger {name} needs its package: pip install {name}")


def on_main_process(accelerator: Accelerator, function, *args, **kwargs) -> None:
    """Calls `function` on the main process alone; a UserError or OSError there becomes a UserError on every rank."""
    error = None
    if accelerator.is_main_process:
        try:
            function(*args, **kwargs)
        except UserError as exception:
            error = str(exception)
        except OSError as exception:  # a full disk, say
            error = f"{exception.strerror or exception}: {exception.filename or function.__name__}"
    error = broadcast_object_list([error])[0]
    if error:
        raise UserError(error)
