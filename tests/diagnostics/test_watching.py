"""diagnose.py --watch: what is said of healthy training loops, their bits, scripts that end in many ways."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import slow_turns

from utils.diagnostics.watching.result import Result
from utils.diagnostics.watching.watcher import Watcher

LOOPS = Path(__file__).parents[1] / "watched"
HEALTHY = {
    "plain_ddpm.py": "trains epsilon-prediction on a linear schedule of 1000 steps; errors weighed equally; AdamW",
    "accelerated.py": "trains v-prediction on a cosine schedule of 1000 steps",
    "edm_loop.py": "sigma_data 0.5",
    "flow_loop.py": "trains the flow's velocity",
    "closure_loop.py": "trains epsilon-prediction on a linear schedule of 1000 steps; errors weighed equally; Adam",
    "adapter_loop.py": "Network by ModuleList beside it, which trains epsilon-prediction on a linear schedule of 1000 steps; "
    "errors weighed by min(SNR, gamma) / SNR with gamma 5; AdamW",
    "control_loop.py": "Controlled by Control beside it, which trains epsilon-prediction on a linear schedule of 1000 steps",
}


def slow(script: str) -> list:
    return [] if script in ("flow_loop.py", "adapter_loop.py") else [pytest.mark.slow]


def watch(server, folder: Path, script: Path, *arguments, updates: int | None = None) -> tuple[int, str, dict[str, dict]]:
    """(exit status, what was printed, the findings by their codes)"""
    limit = [] if updates is None else ["--watch_updates", updates]
    [run] = server.start(["diagnose.py", "--watch_dir", folder / "seen", *limit, "--watch", script, *arguments])
    status = run.wait(200)
    assert (folder / "seen" / "report.html").exists(), run.text()[-3000:]
    findings = json.loads((folder / "seen" / "diagnosis.json").read_text())
    assert "watcher stopped" not in run.text(), run.text()[-3000:]
    return status, run.text(), {finding["code"]: finding for finding in findings}


@pytest.mark.parametrize("script", [pytest.param(script, marks=slow(script)) for script in HEALTHY])
def test_a_healthy_loop_is_identified_and_trains_the_same_bits(server, tmp_path, script):
    steps = 9
    status, text, findings = watch(server, tmp_path, LOOPS / script, steps)
    assert (status, findings) == (0, {}), text[-3000:]
    assert HEALTHY[script] in text and text.endswith("\n0 critical, 0 warnings: nothing found\n")
    assert "averaged weights" in text
    losses = server.run([LOOPS / script, steps])
    assert losses.count("0x") == steps and text.startswith(losses.rstrip("\n"))


@pytest.mark.parametrize(
    ("how", "status"),
    [
        *(("end", 0), ("crash", 1), ("_exit", 5), ("SIGTERM", -15)),
        *slow_turns(("exit", 7), ("word", 1), ("interrupt", -2), ("SIGINT", -2), ("SIGHUP", -1), ("SIGUSR1", -10)),
        *slow_turns(("workers", 0)),
    ],
)
def test_the_script_ends_as_it_would(server, tmp_path, how, status):
    seen, text, findings = watch(server, tmp_path, LOOPS / "misbehaving.py", how, 6)
    assert seen == status
    assert findings == {}
    assert "6 updates of Network" in text and text.endswith("nothing found\n" if how != "word" else "\n")
    page = (tmp_path / "seen" / "report.html").read_text()
    assert "6 updates of Network" in page and "0 critical, 0 warnings" in page
    if how == "crash":
        assert "ValueError: the script's own error" in text and "runpy" not in text


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
        *slow_turns(("os._exit(3)", 3), ("raise GeneratorExit", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -9)),
        *slow_turns(("signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); signal.raise_signal(signal.SIGTERM)", 4)),
    ],
)
def test_a_script_that_ends_before_anything_was_looked_at_leaves_a_report(server, tmp_path, end, status):
    (tmp_path / "early.py").write_text(f"import os, signal, sys\n{end}\n")
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "report.html").write_text("of an earlier script")
    seen, text, findings = watch(server, tmp_path, tmp_path / "early.py")
    assert (seen, findings) == (status, {})
    assert ("nothing was judged" in text) == (status != -9) and "nothing found" not in text
    page = (tmp_path / "seen" / "report.html").read_text()
    assert "of an earlier script" not in page and "Nothing was recorded that could be checked" in page


@pytest.mark.parametrize(
    ("severity", "found", "own", "status"),
    [
        *(("critical", "critical", 0, 1), ("critical", "warning", 0, 0), ("warning", "warning", 0, 1)),
        *(("critical", None, 0, 0), ("critical", "critical", 7, 7), (None, "critical", 0, 0)),
        *(("critical", "nothing judged", 0, 2), ("warning", "failure", 0, 2)),
    ],
)
def test_the_exit_status_of_both(monkeypatch, tmp_path, capsys, severity, found, own, status):
    """That of the script where it failed; else that of the findings, or of nothing that was looked at."""
    check = {"stage": "input", "name": "x", "declared": "a", "observed": "b", "looks": 1, "message": "m"}
    check |= {"healthy": found not in ("critical", "warning"), "severity": found}
    history = [] if found == "nothing judged" else [{"step": 2, "audit": {"checks": [check]}}]
    watcher = Watcher(lambda watcher: None)
    watcher.judge.history, watcher.failure = history, "an error" if found == "failure" else ""
    assert Result(tmp_path, fail_on=severity).status(watcher, own) == status
    assert capsys.readouterr().err.count("error: --fail_on") == (status == 2)
    monkeypatch.setenv("RANK", "1")
    assert Result(tmp_path, fail_on=severity).status(watcher, own) == own


def test_a_fault_can_fail_a_script_that_ends_well(server, tmp_path):
    shutil.copytree(LOOPS, tmp_path / "loops", ignore=shutil.ignore_patterns("__pycache__"))
    broken = tmp_path / "loops" / "plain_ddpm.py"
    broken.write_text(broken.read_text().replace("(1 - a).sqrt() * noise", "(1 - a) * noise"))
    [run] = server.start(["diagnose.py", "--watch_dir", tmp_path / "seen", "--fail_on", "critical", "--watch", broken, 5])
    assert run.wait(200) == 1
    count = run.text().index("\n1 critical, 0 warnings\nFAIL  step-input: ")
    assert "watched: 5 updates" in run.text()[:count] and "declared | observed" not in run.text()


def test_a_flag_of_ours_after_the_script_is_said_to_be_the_scripts(server, tmp_path):
    (tmp_path / "silent.py").write_text("")
    words = ["--steps", 3, "--watch_updates", 5, "--fail-on=critical"]
    _, text, _ = watch(server, tmp_path, tmp_path / "silent.py", *words)
    note = "note: the script gets --watch_updates, --fail-on, and diagnose.py does not: its own flags stand before --watch"
    assert text.count(note) == 2
    assert text.startswith("note: ")  # before it runs for hours


def test_a_folder_that_cannot_be_written_is_said_before_the_script_runs(server, tmp_path):
    (tmp_path / "loud.py").write_text("print('runs')")
    [run] = server.start(["diagnose.py", "--watch_dir", tmp_path / "loud.py" / "x", "--watch", tmp_path / "loud.py"])
    assert run.wait() == 2
    assert run.text().splitlines()[0].startswith("error: cannot write to --watch_dir ") and "runs" not in run.text()


def test_a_script_that_never_trains(server, tmp_path):
    status, text, findings = watch(server, tmp_path, LOOPS / "misbehaving.py", "nothing", 6)
    assert (status, findings) == (0, {})
    assert "no optimizer step was seen" in text


def test_of_networks_that_are_no_denoisers_nothing_is_judged(server, tmp_path):
    status, text, findings = watch(server, tmp_path, LOOPS / "autoencoder.py", 9)
    assert (status, findings) == (0, {})
    assert "optimizer steps (AdamW of 2,055 parameters), but no network" in text and text.count("0x") == 9


def test_it_ends_after_the_updates_asked_for(server, tmp_path):
    status, text, _ = watch(server, tmp_path, LOOPS / "misbehaving.py", "exit", 50, updates=4)
    assert status == 0 and "4 updates" in text and text.count("0x") == 4


def test_no_such_script(server, tmp_path):
    [run] = server.start(["diagnose.py", "--watch", tmp_path / "nothing.py", "--flag"])
    assert run.wait() == 2
    assert run.text().strip() == f"error: --watch {tmp_path / 'nothing.py'}: no such script\ncheck the path"


def test_of_two_networks_the_one_that_gets_noised_images_is_judged(server, tmp_path):
    status, text, findings = watch(server, tmp_path, LOOPS / "two_networks.py", 9)
    assert (status, findings) == (0, {})
    assert "trains epsilon-prediction" in text and "several optimizers (Network by Adam, Network by Adam)" in text


def test_a_loop_that_tells_what_it_trains(server, tmp_path):
    folder = tmp_path / "watch" / "telling"
    server.run([LOOPS / "telling.py", folder])
    assert json.loads((folder / "diagnosis.json").read_text()) == []
    assert "epsilon" in (folder / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True])
def test_two_processes(server, tmp_path, fault):
    shutil.copytree(LOOPS, tmp_path / "loops", ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "loops" / "accelerated.py"
    if fault:
        source = script.read_text()
        assert "output = model(" in source
        script.write_text(source.replace("output = model(", "output = accelerator.unwrap_model(model)("))
    runs = server.start(["diagnose.py", "--watch_dir", tmp_path / "seen", "--watch", script, 6], num_processes=2)
    assert [run.wait(200) for run in runs] == [0, 0], runs[0].text()[-3000:]
    codes = [finding["code"] for finding in json.loads((tmp_path / "seen" / "diagnosis.json").read_text())]
    assert ("step-ranks" in codes) == fault, runs[0].text()[-3000:]


def test_an_error_of_the_watcher_is_one_line(server, tmp_path):
    shutil.copytree(LOOPS, tmp_path / "loops", ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "loops" / "plain_ddpm.py"
    script.write_text(script.read_text().replace("    optimizer = ", "    model.modules = None\n    optimizer = "))
    [run] = server.start(["diagnose.py", "--watch_dir", tmp_path / "seen", "--watch", script, 6])
    assert run.wait(100) == 0
    assert run.text().count("the watcher stopped, the script goes on: TypeError") == 1 and run.text().count("0x") == 6


@pytest.mark.parametrize("part", ["step", *(pytest.param(part, marks=pytest.mark.slow) for part in ("module", "inplace"))])
def test_what_torch_compiles_runs_as_before(part, tmp_path):
    """In a process of its own, which has not imported torch's compiler before the hooks are there."""
    words = [[], [str(LOOPS.parents[1] / "diagnose.py"), "--watch_dir", str(tmp_path), "--watch"]]
    losses = []
    for before in words:
        command = [sys.executable, *before, str(LOOPS / "compiled_loop.py"), part]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        losses.append([line for line in run.stdout.splitlines() if line.startswith("loss")])
        assert "watcher stopped" not in run.stderr
    assert len(losses[0]) == 24 == len(losses[1])
    first, second = ([float(line.split()[1]) for line in one] for one in losses)
    assert first == pytest.approx(second, rel=1e-4)  # updates that are looked at run eagerly, and round otherwise
    assert "watched: 24 updates of Network, which trains epsilon-prediction" in run.stdout
