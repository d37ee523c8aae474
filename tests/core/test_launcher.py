"""What a launcher's settings mean here: refused ones, and whose OMP_NUM_THREADS it is."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from queue import Queue
from types import SimpleNamespace

import pytest
from conftest import ROOT, run_command, script_environment, without_progress

from utils.core import launcher as launcher_module
from utils.core.distributed import make_accelerator
from utils.core.errors import UserError
from utils.core.launcher import asked_threads, check_accumulation, check_precision, lone_process

LAUNCHER = """
import os, subprocess, sys
environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # as torchrun does
code = "from utils.core.launcher import asked_threads, launcher_reports; print(asked_threads(), launcher_reports())"
subprocess.run([sys.executable, "-c", code], env=environment, check=True)
"""


@pytest.mark.parametrize(
    ("launcher", "threads", "flags", "asked"),
    [
        ("torchrun", None, [], "None True"),  # the launcher's own 1
        ("torchrun", "1", [], "1 True"),  # the user's
        ("accelerate-launch", "3", [], "3 True"),
        ("accelerate-launch", None, ["--num-cpu-threads-per-process=1"], "1 True"),
        ("accelerate-launch", None, ["--quiet", "script.py"], "None False"),
        ("accelerate-launch", None, ["script.py", "--quiet"], "None True"),  # of the script
        ("shell", None, [], "1 False"),  # no launcher: whoever set it meant it
    ],
)
def test_threads_that_the_user_asked_for_are_told_from_those_of_a_launcher(launcher, threads, flags, asked, tmp_path):
    path = tmp_path / launcher
    path.write_text(LAUNCHER)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": threads} if threads else {}
    result = subprocess.run([sys.executable, path, *flags], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == asked


def lone_process_below(monkeypatch, tmp_path, flags: list[str], config: str | None = None, **given) -> str | None:
    """What is said in a process that `accelerate launch` with these flags has started, with a default config file."""
    from accelerate.commands.config import config_args

    default, launcher = tmp_path / "default_config.yaml", given.pop("launcher", ["/bin/python", "/bin/accelerate", "launch"])
    if config is not None:
        default.write_text(f"compute_environment: LOCAL_MACHINE\nuse_cpu: true\nnum_machines: 1\n{config}\n")
    monkeypatch.setattr(config_args, "default_config_file", str(default))
    monkeypatch.setattr(launcher_module, "launcher_words", lambda: [*launcher, *flags, "train.py", ""])
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if given.pop("told", True):  # of others by the launcher
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return lone_process(given.get("num_processes", 1), given.get("on_cpu", True))


@pytest.mark.parametrize(
    ("flags", "given", "told"),
    [
        (["--cpu", "--num_processes", "2"], {}, True),
        (["--cpu", "--num-processes=2"], {}, True),
        (["--num_processes=2", "--cpu"], {"launcher": ["/bin/python", "-m", "accelerate.commands.launch"]}, True),
        (["--num_processes=2", "--cpu"], {"launcher": ["/bin/python", "/bin/accelerate-launch"]}, True),
        (["--num_processes", "2"], {"config": "distributed_type: 'NO'\nnum_processes: 1"}, True),
        ([], {"config": "distributed_type: MULTI_CPU\nnum_processes: 2"}, True),
        (["--cpu", "--num_processes", "1"], {"told": False}, False),
        (["--multi_gpu", "--num_processes", "2"], {"num_processes": 2}, False),
        # MASTER_ADDR is the user's, or is there because the machine has several GPUs, that nobody asked for
        (["--cpu"], {}, False),
        (["--cpu"], {"config": "distributed_type: MULTI_GPU\nnum_processes: 8"}, False),
        (["--cpu", "--num_processes", "1"], {}, False),
        (["--cpu", "diagnose.py", "--watch", "theirs.py", "--num_processes", "2"], {}, False),  # of the script
        (["--nproc_per_node=2"], {"launcher": ["/bin/python", "/bin/torchrun"]}, False),
        ([], {"launcher": []}, False),  # a shell, or srun
    ],
)
def test_fewer_processes_than_were_asked_for_are_told(flags, given, told, monkeypatch, tmp_path):
    said = "warning: accelerate launch was asked for 2 processes, but started 1. This starts 2: "
    command = "accelerate launch --multi_gpu --num_processes 2 ..."
    for on_cpu, first in ((True, "ACCELERATE_USE_CPU=true "), (False, "")):
        found = lone_process_below(monkeypatch, tmp_path, flags, **given, on_cpu=on_cpu)
        assert found == (said + first + command if told else None)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "started"), [("--cpu", 1), ("--multi_gpu", 2)])
def test_the_command_that_is_told_starts_as_many(kind, started, tiny_flags, tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", kind, "--num_processes", 2, "--main_process_port", 0]
    flags = [*tiny_flags, "--max_train_steps", 1, "--output_dir", tmp_path]
    result = run_command([*command, ROOT / "train_ddpm.py", *flags], script_environment() | {"ACCELERATE_USE_CPU": "true"})
    assert result.returncode == 0 and f"num_processes {started}," in result.stdout, result.stderr
    assert ("was asked for 2 processes, but started 1." in result.stderr) == (started == 1)


@pytest.mark.parametrize(("value", "threads"), [("4", 4), ("4,2", 4), ("", None), ("0", None), ("many", None)])
def test_odd_values_of_omp_num_threads(value, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert asked_threads() == threads


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_USE_FSDP", "true", "launched with FSDP, .*\n.*accelerate_configs/cpu.yaml"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "launched with DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "launched with Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "launched with a parallelism config"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "launched with dynamo_backend inductor, .*--compile"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "the launcher's mixed_precision fp16 needs a GPU\non a CPU, set --mixed_prec"),
        ("ACCELERATE_MIXED_PRECISION", "fp17", "the launcher's mixed_precision fp17 is not supported\nset --mixed_precision"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "the launcher's mixed_precision fp8 is not supported"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_accelerate_reads_them(variable, value, message, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=message) as error:
        make_accelerator()
    assert str(error.value).count("\n") <= 1


def test_the_script_s_own_precision_wins_over_the_launcher_s(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "FP16")
    assert check_precision("bf16", on_cpu=True) == "bf16"
    assert check_precision(None, on_cpu=False) == "fp16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("distributed_type: 'NO'\nmixed_precision: fp16", "mixed_precision fp16 needs a GPU"),
        ("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}", "launched with FSDP"),
    ],
)
def test_the_user_s_default_config_is_refused_in_one_line(settings, said, tmp_path):
    """As `accelerate config` leaves it; with --quiet the launcher adds nothing below where there is one process."""
    folder = tmp_path / "accelerate"
    folder.mkdir()
    config = f"compute_environment: LOCAL_MACHINE\nuse_cpu: true\nnum_machines: 1\n{settings}\n"
    (folder / "default_config.yaml").write_text(config + ("num_processes: 1\n" if "num_processes" not in config else ""))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", ROOT / "train_ddpm.py"]
    environment = script_environment() | {"HF_HOME": str(tmp_path), "ACCELERATE_USE_CPU": "true"}
    result = run_command([*command, "--output_dir", tmp_path / "run"], environment)
    assert result.returncode == 1 and not (tmp_path / "run").exists()
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0], result.stderr
    if "FSDP" not in said:
        assert [errors[0]] == without_progress(result.stderr)[:1] and len(without_progress(result.stderr)) <= 2


def test_other_micro_steps_of_the_environment_are_refused(train_script, script_flags, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    check_accumulation(2)
    with pytest.raises(UserError, match=r"GRADIENT_ACCUMULATION_STEPS=2, the options .* 1\nunset"):
        train_script([*script_flags, "--output_dir", tmp_path])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but not RANK and MASTER_ADDR and MASTER_PORT: no launcher"),
        ({"WORLD_SIZE": "4", "RANK": "0", "MASTER_PORT": "1"}, "WORLD_SIZE=4, but not MASTER_ADDR: no launcher"),
        ({"LOCAL_RANK": "0"}, "says LOCAL_RANK=0, but not RANK and MASTER_ADDR and MASTER_PORT"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "says OMPI_COMM_WORLD_SIZE=2, but not MASTER_ADDR"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "says PMI_SIZE=2, but not MASTER_ADDR"),
        ({"WORLD_SIZE": ""}, "says WORLD_SIZE='', which is no number\nunset WORLD_SIZE"),
        ({"WORLD_SIZE": "two"}, "says WORLD_SIZE='two', which is no number"),
        ({"RANK": "1"}, "says RANK=1, of 1 in all\nunset RANK"),
        ({"WORLD_SIZE": "2", "RANK": "5", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "says RANK=5, of 2 in all"),
        ({"MASTER_PORT": "http"}, "says MASTER_PORT='http', which is no number"),
        ({}, None),
        ({"RANK": "0"}, None),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "-1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, None),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, None),
    ],
)
def test_what_is_left_over_of_a_launcher_is_named(given, message, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        launcher_module.refuse_lone_variables()


@pytest.fixture
def alone():
    """The environment of one of two processes, of which the other never comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return script_environment() | told | {"ACCELERATE_USE_CPU": "true"}


@pytest.mark.slow
def test_processes_that_never_come_are_waited_for_aloud(alone, tiny_flags, tmp_path):
    flags = [*tiny_flags, "--collective_timeout", 12, "--output_dir", tmp_path / "run"]
    result = run_command([sys.executable, ROOT / "train_ddpm.py", *flags], alone)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    waiting, error = (next(line for line in result.stderr.splitlines() if word in line) for word in ("waiting for", "error: "))
    assert waiting.startswith("waiting for the other processes since 10 s (WORLD_SIZE=2, RANK=0, MASTER_ADDR=127.0.0.1")
    assert error.startswith("error: the other processes of WORLD_SIZE=2 did not come")


def test_a_main_process_without_an_address_is_said(monkeypatch):
    said: Queue[str] = Queue()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=said.put, flush=lambda: None))
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "main.invalid",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    line = launcher_module.said_while_waiting(lambda: said.get(timeout=60), after=0.01)
    assert "MASTER_PORT=1): no address is known for 'main.invalid' (" in line


@pytest.mark.slow
def test_a_signal_stops_a_process_that_waits_for_others(alone, tiny_flags, tmp_path):
    command = [sys.executable, ROOT / "train_ddpm.py", *tiny_flags, "--output_dir", tmp_path / "run"]
    with subprocess.Popen(list(map(str, command)), env=alone, stderr=subprocess.PIPE, text=True) as process:
        said = next(line for line in process.stderr if line.startswith("waiting for"))
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[1]
    assert "WORLD_SIZE=2" in said and "SIGTERM: stopped before the first update" in rest and process.returncode == 75
