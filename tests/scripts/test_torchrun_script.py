"""accelerate_configs/torchrun.sh with a stand-in for torchrun, which gives 1 for all but 0 and knows no SIGUSR1."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, end_group

SCRIPT = ROOT / "accelerate_configs" / "torchrun.sh"
# Ends as told: with a status, with none (a crash), or once it gets a signal.
TORCHRUN = f"""#!{sys.executable}
import os, signal, sys
from pathlib import Path
output_dir = Path(sys.argv[sys.argv.index("--output_dir") + 1])
Path("seen").write_text("|".join(sys.argv[1:]))
status = os.environ["ENDS"]
if status == "stopped":
    numbers = {{signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    print("ready", flush=True)
    Path("told").write_text(signal.Signals(signal.sigwait(numbers)).name)
    Path("pending").write_text(str(len(signal.sigpending())))
    status = "75"
if status != "crash":
    output_dir.mkdir(exist_ok=True)
    (output_dir / "exit_status").write_text(status.removesuffix(" and no push") + "\\n")
sys.exit(status != "0")
"""


@pytest.fixture
def start(tmp_path):
    """Starts the script, with 2 processes and `flags`, in a folder and a process group of its own."""
    (tmp_path / "torchrun").write_text(TORCHRUN)
    (tmp_path / "torchrun").chmod(stat.S_IRWXU)
    started = []

    def run(ends: str, *flags: str) -> subprocess.Popen:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ENDS": ends, "TMPDIR": str(tmp_path)}
        command = ["bash", str(SCRIPT), "2", "a run", "train.py", *flags]
        options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **options))
        return started[-1]

    yield run
    for process in started:
        process.stdout.close()
        end_group(process)


def test_torchrun_gets_the_flags_and_continues_the_run(start, tmp_path):
    assert start("0", "--name", "two words $HOME").wait(30) == 0
    flags = "--standalone|--nproc_per_node|2|train.py|--name|two words $HOME|--output_dir|a run|--resume_from_checkpoint|latest"
    assert (tmp_path / "seen").read_text() == flags


@pytest.mark.parametrize(("ends", "status"), [("0", 0), ("3", 3), ("75", 75), ("crash", 1), ("0 and no push", 1)])
@pytest.mark.parametrize("earlier", [None, "0", "75"])
def test_the_status_is_that_of_this_start(start, tmp_path, ends, status, earlier):
    if earlier is not None:
        (tmp_path / "a run").mkdir()
        (tmp_path / "a run" / "exit_status").write_text(earlier)
    assert start(ends).wait(30) == status


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["script", "group"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_each_signal_stops_the_run_which_is_waited_for(start, tmp_path, number, send):
    process = start("stopped")
    assert process.stdout.readline() == "ready\n"
    send(process.pid, number)
    assert process.wait(30) == 75
    assert (Path(tmp_path, "told").read_text(), Path(tmp_path, "pending").read_text()) == ("SIGTERM", "0")


def test_a_loop_goes_on_until_the_run_is_done(tmp_path):
    """As the documentation has it, of starts that end with 75, 75 and 0, and with 75 and 3."""
    page = (ROOT / "docs" / "reliability.md").read_text()
    (loop,) = [block for block in page.split("```")[1::2] if "torchrun.sh" in block and "until" in block]
    (tmp_path / "accelerate_configs").mkdir()
    for statuses in ("75 75 0", "75 3"):
        (tmp_path / "left").write_text("\n".join(statuses.split()) + "\n")
        stand_in = "status=$(head -n 1 left); sed -i 1d left; exit $status\n"
        (tmp_path / "accelerate_configs" / "torchrun.sh").write_text(stand_in)
        ended = subprocess.run(["bash", "-c", loop.removeprefix("bash\n")], cwd=tmp_path, timeout=30)
        assert (tmp_path / "left").read_text() == "" and ended.returncode == int(statuses.split()[-1])
