"""How a process ends whose output nobody takes, or whose peers do not answer."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from safetensors import SafetensorError

from utils.core import entrypoint
from utils.core.errors import FailedElsewhere

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from utils.core.entrypoint import run_script

def main(options):
    for _ in range(100):
        print("x" * 1000)
        print("y", file=sys.stderr, flush=True)
    return 75

run_script(main, dict, outlives_output={outlives})
"""


DDP = """
import torch
from utils.core.entrypoint import run_script

def main(options):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), broadcast_buffers=False)
    torch.distributed.destroy_process_group()

run_script(main, dict)
"""


def nobody() -> int:
    """A pipe whose reader is gone, as `tee` after Ctrl-C."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("output", [nobody, lambda: os.open("/dev/full", os.O_WRONLY)], ids=["pipe", "disk"])
@pytest.mark.parametrize("outlives", [True, False])
def test_a_run_outlives_those_who_read_what_it_prints(output, outlives):
    descriptor = output()
    program = [sys.executable, "-c", PROGRAM.format(outlives=outlives)]
    ended = subprocess.run(program, stdout=descriptor, stderr=descriptor, cwd=ROOT, timeout=60, check=False)
    os.close(descriptor)
    assert (ended.returncode == 75) is outlives


def test_missing_packages_are_named_together_before_any_is_imported(monkeypatch, capsys):
    monkeypatch.setattr(entrypoint, "REQUIRED", ("numpy", "no_such_package", "nor_this"))
    with pytest.raises(SystemExit) as ended:
        entrypoint.parse_early(dict)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: not installed: no_such_package, nor_this\npip install -r requirements.txt\n"


def test_a_script_without_any_package_names_them_all():
    code = f"import sys; sys.modules |= dict.fromkeys({entrypoint.REQUIRED}); sys.argv = ['train_ddpm.py']; "
    code += "import runpy; runpy.run_path('train_ddpm.py', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False, capture_output=True, text=True)
    said = f"error: not installed: {', '.join(entrypoint.REQUIRED)}\npip install -r requirements.txt\n"
    assert (ended.returncode, ended.stderr) == (2, said)


def test_the_required_packages_are_those_of_the_requirements():
    listed = (ROOT / "requirements.txt").read_text().split("# Development")[0]
    names = set(re.findall(r"^[A-Za-z0-9_-]+", listed, re.MULTILINE)) - {"tensorboard"}
    imported = {"Pillow": "PIL", "PyYAML": "yaml", "scikit-learn": "sklearn"}
    assert {imported.get(name, name) for name in names} == set(entrypoint.REQUIRED)


def test_nobody_is_warned_of_an_argument_that_accelerate_passes():
    ended = subprocess.run([sys.executable, "-c", DDP], cwd=ROOT, timeout=60, check=True, capture_output=True, text=True)
    assert "broadcast_buffers" not in ended.stderr


def test_a_run_whose_output_is_closed_from_the_start():
    program = f"{sys.executable} -c '{PROGRAM.format(outlives=True)}' >&- 2>&-"
    assert subprocess.run(program, shell=True, cwd=ROOT, timeout=60, check=False).returncode == 75


@pytest.mark.parametrize("kept", [True, False])
def test_a_count_of_what_was_said_that_never_comes_is_not_waited_for(monkeypatch, kept):
    """Of a store in a process that is stopped."""
    store = SimpleNamespace(add=lambda name, adding: threading.Event().wait() if not kept else 3)
    monkeypatch.setattr(entrypoint, "PATIENCE", 0.05)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert entrypoint._times_said("out of memory", 1) == (3 if kept else 0)


def test_a_rank_that_is_well_leaves_the_word_to_the_one_that_failed(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(entrypoint.time, "sleep", waited.append)

    def main(options):
        raise FailedElsewhere("rank 0: ValueError: v")

    with pytest.raises(SystemExit) as ended:
        entrypoint.run_script(main, lambda: None)
    assert ended.value.code == 1 and waited == [entrypoint.WAIT_FOR_FIRST]
    assert "".join(capsys.readouterr()) == ""


@pytest.mark.parametrize(
    ("told", "said"),  # the first by torch's handler of SIGCHLD
    [
        (
            "DataLoader worker (pid 7) is killed by signal: Killed. ",
            "a process that reads images ended: RuntimeError: DataLoader",
        ),
        ("Too many open files. Communication with the workers is no longer possible.", "a process that reads images ended: "),
        ("can't start new thread", "RuntimeError: can't start new thread\nraise `ulimit -u`"),
        (OSError(28, "No space left on device", "out/grid.png"), "No space left on device: out/grid.png\n"),
        (OSError(28, "No space left on device", "mine.py", None, "out/copy.py"), "No space left on device: out/copy.py\n"),
        (OSError(28, "No space left on device"), "No space left on device\n"),
        (SafetensorError("Error while serializing: I/O error: No space left (os error 28)"), "No space left (os error 28)\n"),
    ],
)
def test_what_a_machine_lacks_is_one_line_wherever_it_is_said(told, said, capsys):
    def main(options):
        raise RuntimeError(told) if isinstance(told, str) else told

    with pytest.raises(SystemExit) as ended:
        entrypoint.run_script(main, lambda: None)
    text = capsys.readouterr().err
    assert ended.value.code == 2 and text.startswith(f"error: {said}") and "Traceback" not in text


def test_ctrl_c_while_the_libraries_load_is_one_line_and_a_crash_keeps_its_traceback():
    """In the scripts; importing their modules, as `watch` does, changes nothing for the script that imports them."""
    program, parsed = (
        "import utils.core.entrypoint as entrypoint, types\n{}raise {}",
        "entrypoint.parse_early(types.SimpleNamespace)\n",
    )
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    for before, error, said, status in (
        (parsed, "KeyboardInterrupt", "\nstopped by Ctrl-C\n", -signal.SIGINT),
        (parsed, "OSError", None, 1),
        ("", "KeyboardInterrupt", None, -signal.SIGINT),
    ):
        command = [sys.executable, "-c", program.format(before, error)]
        how = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 60, "env": environment}
        ended = subprocess.run(command, check=False, **how)
        assert ended.returncode == status
        assert ended.stderr == said or (said is None and ended.stderr.startswith("Traceback"))


STOPPED = """
import os, signal, sys
from utils.core import entrypoint, signals
entrypoint.launcher_reports = lambda: True
signals.launcher_words = lambda: ["accelerate", "launch"]
def main(_):
    signals.StopSignal(1).listen()
    signal.raise_signal(getattr(signal, sys.argv[1]))
    print("stopped after 3 updates", file=sys.stderr)
    return signals.EXIT_STOPPED
entrypoint.run_script(main, lambda: None)
"""


@pytest.mark.parametrize(
    ("number", "last"),
    [
        ("SIGINT", "stopped after 3 updates"),  # of Ctrl-C and the launcher's traceback it has told before
        ("SIGTERM", "(the text below is from the launcher: you can ignore it)"),
    ],
)
def test_of_the_launcher_is_spoken_once(number, last):
    result = subprocess.run([sys.executable, "-c", STOPPED, number], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 75 and result.stderr.splitlines()[-1] == last
    assert result.stderr.count("launcher") == 1
