"""The launcher that started this process: ended with it, and what it was asked for. Imports no torch."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from utils.core.errors import UserError

T = TypeVar("T")
ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
LAUNCHERS = (*ACCELERATE, "torchrun", "torch.distributed.run")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # numbers of processes, of torch and of MPI
UNSUPPORTED = {  # what `accelerate launch` sets -> its name
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
ADVICE = "use accelerate launch --config_file accelerate_configs/cpu.yaml (or single_gpu.yaml, multi_gpu.yaml)"


def launcher_words() -> list[str]:
    """Returns the command line of the launcher whose child this process is; empty where it is none, such as a shell or srun."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:  # not Linux, or gone
        return []
    names = [word.decode(errors="replace") for word in words]
    return [] if {Path(name).name for name in names[:4]}.isdisjoint(LAUNCHERS) else names


def launcher_reports() -> bool:
    """Returns whether a launcher will print a report of its own, of 10 lines and more, once this process ends with an error."""
    words = launcher_words()
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    return bool(words) and {"-q", "--quiet"}.isdisjoint(words[:script])


def stop_with_launcher() -> None:
    """Asks Linux for a SIGTERM when the launcher that started this process dies, for `accelerate launch` and torchrun do not
    pass on every signal: without it their training processes would train on, alone."""
    parent = os.getppid()
    if launcher_words():
        end_with_parent(parent, signal.SIGTERM)


def end_with_parent(parent: int, number: int) -> None:
    """Asks Linux to send this process the signal `number` when the process `parent`, which started it, dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(128 + number)


def asked_threads() -> int | None:
    """Returns the threads per process that the user asked for, by OMP_NUM_THREADS or --num_cpu_threads_per_process; None where
    nobody did. Launchers set OMP_NUM_THREADS for their children themselves, so it is their own environment that tells."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is one number for each nested level
    if not threads.isdecimal() or int(threads) < 1:
        return None
    if words := launcher_words():
        flags = {word.split("=")[0].replace("-", "_") for word in words}
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
            if "__num_cpu_threads_per_process" not in flags and not any(v.startswith(b"OMP_NUM_THREADS=") for v in variables):
                return None
    return int(threads)


def lone_process(num_processes: int, on_cpu: bool) -> str | None:
    """Returns a warning where this process is alone, though `accelerate launch` was asked for several: with --cpu, or with a
    config file of one GPU, it starts one, and leaves MASTER_ADDR for the others in vain. None elsewhere."""
    if num_processes > 1 or "MASTER_ADDR" not in os.environ or (asked := _asked_processes(launcher_words())) < 2:
        return None
    command = "ACCELERATE_USE_CPU=true " * on_cpu + f"accelerate launch --multi_gpu --num_processes {asked} ..."
    return f"warning: accelerate launch was asked for {asked} processes, but started 1. This starts {asked}: {command}"


def _asked_processes(words: list[str]) -> int:
    """Returns how many the command line of an `accelerate launch` asks for, or else its config file; 0 where neither says."""
    start = next((place for place, word in enumerate(words[:4]) if Path(word).name in ACCELERATE), None)
    if start is None:
        return 0
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    flags = words[start + 1 + (Path(words[start]).name == "accelerate") :]  # behind its sub-command, which is `launch`
    asked, _ = launch_command_parser().parse_known_args([word for word in flags if word])
    if asked.num_processes is not None:
        return asked.num_processes
    config = asked.config_file or ("" if asked.cpu else default_config_file)  # as the launcher itself chooses
    return load_config_from_file(config).num_processes if os.path.isfile(config) else 0


def refuse_launch() -> None:
    """Raises UserError for settings of a launcher that no script here can follow; Accelerate may ignore them silently."""
    refuse_lone_variables()
    for variable, name in UNSUPPORTED.items():
        if os.environ.get(variable, "").lower() in ("1", "true"):
            raise UserError(
                f"launched with {name}, which is not supported: only one process, or DDP\n"
                f"the setting is in your --config_file or from `accelerate config`: {ADVICE}"
            )
    if (backend := os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()) != "no":
        raise UserError(
            f"launched with dynamo_backend {backend}, which is not supported: use --compile to compile the network\n"
            f"the setting is in your --config_file or from `accelerate config`: {ADVICE}"
        )


def refuse_lone_variables() -> None:
    """Raises UserError where a variable of a launcher is left over: the processes that it tells of are not there."""
    told = {name: os.environ[name] for name in (*_SIZES, "RANK", "LOCAL_RANK", "MASTER_PORT") if name in os.environ}
    for name, value in told.items():
        if not value.removeprefix("-").isdecimal():
            raise UserError(f"the environment says {name}={value!r}, which is no number\nunset {name}")
    size = max([1, *(int(told[name]) for name in _SIZES if name in told)])
    if int(told.get("RANK", "0")) >= size:
        raise UserError(f"the environment says RANK={told['RANK']}, of {size} in all\nunset RANK, or start with a launcher")
    several = [name for name in told if name in (*_SIZES, "LOCAL_RANK") and int(told[name]) > (1 if name in _SIZES else -1)]
    if not several:
        return
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if several[0] in ("WORLD_SIZE", "LOCAL_RANK") else ("MASTER_ADDR",)
    if missing := [name for name in needed if not os.environ.get(name)]:
        raise UserError(
            f"the environment says {several[0]}={told[several[0]]}, but not {' and '.join(missing)}: no launcher started this "
            f"process\nunset {several[0]}, or start with accelerate launch or torchrun"
        )


def _unknown_address() -> str:
    """Says that no address belongs to the name in MASTER_ADDR, which may still come; empty where there is one."""
    name = os.environ.get("MASTER_ADDR", "")
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return f": no address is known for {name!r} ({error.strerror})"
    return ""


def in_thread(call: Callable[[], T]) -> "Future[T]":
    """Begins `call` in a thread of its own. So the main thread waits in Python's code, where signals are heard."""
    future: Future[T] = Future()

    def answer() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    return future


def said_while_waiting(connect: Callable[[], T], after: float = 10.0, again: float = 60.0) -> T:
    """Returns `connect()`, in which the processes of a launcher find each other. Says after `after` seconds, and every `again`
    seconds, for what this one waits."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return connect()
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    told = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    says = os.environ.get("LOCAL_RANK", "0") == "0" or not launcher_words()  # variables left over may be those of any process
    start, future, seconds = time.monotonic(), in_thread(connect), after
    while not wait([future], seconds).done:
        seconds = again
        if says:
            print(
                f"waiting for the other processes since {time.monotonic() - start:.0f} s ({told}){_unknown_address()}; "
                "if no launcher started this one, unset these variables",
                file=sys.stderr,
                flush=True,
            )
    return future.result()


def check_accumulation(asked: int) -> None:
    """Raises UserError where the environment tells Accelerate another number of micro steps, which it would take."""
    told = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if told not in ("auto", str(asked)):
        raise UserError(
            f"the environment says ACCELERATE_GRADIENT_ACCUMULATION_STEPS={told}, the options --gradient_accumulation_steps "
            f"{asked}\nunset the variable, and set --gradient_accumulation_steps"
        )


def check_precision(asked: str | None, on_cpu: bool) -> str | None:
    """Returns the script's precision, else that of `accelerate launch`. Raises UserError for one that cannot work."""
    precision = asked or os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() or None
    where = "--mixed_precision" if asked else "the launcher's mixed_precision"
    if on_cpu and precision == "fp16":
        raise UserError(f"{where} fp16 needs a GPU\non a CPU, set --mixed_precision no or bf16")
    if precision not in (None, "no", "bf16", "fp16"):
        raise UserError(f"{where} {precision} is not supported\nset --mixed_precision no, bf16 or fp16")
    return precision
