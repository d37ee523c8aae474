"""diagnose.py --watch: what is said of healthy training loops, their bits, scripts that end in many ways."""

import html
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import slow_turns

from steady_doctor.identify.step import Pass, Step
from steady_doctor.identify.update import Gradient, Update
from steady_doctor.result import SETTLING, Result
from steady_doctor.words import Finding

LOOPS = Path(__file__).parents[1] / "watched"
HEALTHY = {
    "plain_ddpm.py": "Network; variance-preserving path, epsilon, errors weighed equally; AdamW; averages of 0.99",
    "accelerated.py": "UNet2DModel; variance-preserving path, v, errors weighed equally; AdamW; averages of 0.",
    "edm_loop.py": "Network; images + sigma noise, scaled for sigma_data 0.5, EDM's target, errors weighed equally; Adam",
    "flow_loop.py": "Network; straight path from images to noise, the velocity to noise, errors weighed equally; SGD",
    "closure_loop.py": "Joined; variance-preserving path, epsilon, errors weighed equally; Adam; averages of 0.95",
    "adapter_loop.py": "ModuleList; variance-preserving path, epsilon, min-SNR 5; AdamW; averages of 0.99",
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
    assert "doctor stopped" not in run.text(), run.text()[-3000:]
    return status, run.text(), {finding["code"]: finding for finding in findings}


@pytest.mark.parametrize("script", [pytest.param(script, marks=slow(script)) for script in HEALTHY])
def test_a_healthy_loop_is_identified_and_trains_the_same_bits(server, tmp_path, script):
    steps = 9
    status, text, findings = watch(server, tmp_path, LOOPS / script, steps)
    assert (status, findings) == (0, {}), text[-3000:]
    assert f"\nwatched: 9 updates of {HEALTHY[script]}" in text
    assert text.endswith("\n0 critical, 0 warnings: nothing found\n")
    losses = server.run([LOOPS / script, steps])
    assert losses.count("0x") == steps and text.startswith(losses.rstrip("\n"))


def test_a_script_that_catches_the_end_that_was_asked_for_has_not_come_to_its_own(server, tmp_path):
    loop, lines = tmp_path / "loop.py", (LOOPS / "plain_ddpm.py").read_text().replace("(step + 1) / 4", "(step + 1) / 1000")
    loop.write_text(lines.replace("    main()\n", "    try:\n        main()\n    except SystemExit:\n        pass\n"))
    for updates, codes in ((20, []), (None, ["rate-still-rising"])):
        assert list(watch(server, tmp_path, loop, 24, updates=updates)[2]) == codes


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
        *(("os.kill(os.getpid(), signal.SIGTERM)", -15), ("", 0)),
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
    assert status or "no optimizer step was seen" in text
    page = (tmp_path / "seen" / "report.html").read_text()
    assert "of an earlier script" not in page and "Nothing was recorded that could be checked" in page


def found_as(severity: str) -> Finding:
    return Finding("input-path", "input", severity, "a title", "this", "that", "an edit", ("undo it",), 2)


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

    def result() -> Result:
        made = Result(tmp_path, fail_on=severity)
        made.findings = [found_as(found)] if found in ("critical", "warning") else []
        made.failure = "an error" if found == "failure" else ""
        if found != "nothing judged":
            made.doctor.seen.steps.append(Step(Update(2, Gradient(1)), [Pass(mixture=object())]))
        return made

    assert result().status(own) == status
    assert capsys.readouterr().err.count("error: --fail_on") == (status == 2)
    monkeypatch.setenv("RANK", "1")
    assert result().status(own) == own


def test_a_fault_can_fail_a_script_that_ends_well(server, tmp_path):
    shutil.copytree(LOOPS, tmp_path / "loops", ignore=shutil.ignore_patterns("__pycache__"))
    broken = tmp_path / "loops" / "plain_ddpm.py"
    broken.write_text(broken.read_text().replace("(1 - a).sqrt() * noise", "(1 - a) * noise"))
    [run] = server.start(["diagnose.py", "--watch_dir", tmp_path / "seen", "--fail_on", "critical", "--watch", broken, 5])
    assert run.wait(200) == 1
    text, page = run.text(), (tmp_path / "seen" / "report.html").read_text()
    assert text.index("watched: 5 updates") < text.index("\nFAIL  input-sub-vp: ") < text.index("      try: ")
    [finding] = json.loads((tmp_path / "seen" / "diagnosis.json").read_text())
    keys = {"code", "severity", "stage", "title", "cause", "fixes", "declared", "observed", "step"}
    assert finding.keys() == keys and (finding["stage"], finding["step"]) == ("input", 2)
    page = html.unescape(page)
    assert finding["title"] in page and finding["fixes"][0] in page and "<script" not in page


def test_a_flag_of_ours_after_the_script_is_said_to_be_the_scripts_and_its_name_is_escaped(server, tmp_path):
    (tmp_path / "<b>.py").write_text("")
    words = ["--steps", 3, "--watch_updates", 5, "--fail-on=critical"]
    _, text, _ = watch(server, tmp_path, tmp_path / "<b>.py", *words)
    note = "note: the script gets --watch_updates, --fail-on, and the doctor does not: its own flags stand before the script"
    assert text.startswith(note) and text.count(note) == 2  # before it runs for hours, and at the end, where people look
    assert "<h1>&lt;b&gt;.py</h1>" in (tmp_path / "seen" / "report.html").read_text()


def test_what_cannot_be_watched_is_said_before_the_script_runs(server, tmp_path):
    loud, missing = tmp_path / "loud.py", tmp_path / "nothing.py"
    loud.write_text("print('runs')")
    for words, said in (
        (["--watch_dir", loud / "x", "--watch", loud], f"error: cannot write to --watch_dir {loud / 'x'}: "),
        (["--watch", missing, "--flag"], f"error: --watch {missing}: no such script\ncheck the path"),
    ):
        [run] = server.start(["diagnose.py", *words])
        assert run.wait() == 2
        assert run.text().startswith(said) and run.text().strip().count("\n") == 1 and "runs" not in run.text()


def test_a_script_that_cannot_be_parsed(tmp_path):
    (tmp_path / "broken.py").write_text("print(\n")
    said = [alone(tmp_path, *words, "broken.py", path=LOOPS.parents[1]) for words in ((), ("-m", "steady_doctor"))]
    assert [run.returncode for run in said] == [1, 1] and "SyntaxError" in said[0].stderr
    assert said[0].stderr == said[1].stderr


def test_of_networks_that_are_no_denoisers_nothing_is_judged(server, tmp_path):
    status, text, findings = watch(server, tmp_path, LOOPS / "autoencoder.py", 9)
    assert (status, findings) == (0, {})
    assert "no mixture of image and noise was identified: " in text
    assert text.count("0x") == 9


def test_it_ends_after_the_updates_asked_for(server, tmp_path):
    status, text, _ = watch(server, tmp_path, LOOPS / "misbehaving.py", "exit", 50, updates=4)
    assert status == 0 and "4 updates" in text and text.count("0x") == 4


def test_of_two_networks_the_one_that_gets_noised_images_is_judged(server, tmp_path):
    status, text, findings = watch(server, tmp_path, LOOPS / "two_networks.py", 9)
    assert (status, findings) == (0, {})
    assert "variance-preserving path, epsilon" in text


def test_a_loop_that_tells_what_it_trains(server, tmp_path):
    folder = tmp_path / "watch" / "telling"
    server.run([LOOPS / "telling.py", folder])
    assert json.loads((folder / "diagnosis.json").read_text()) == []
    assert "6 updates of Network; variance-preserving path, epsilon" in (folder / "report.html").read_text()


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
    stages = [finding["stage"] for finding in json.loads((tmp_path / "seen" / "diagnosis.json").read_text())]
    assert ("ranks" in stages) == fault, runs[0].text()[-3000:]
    assert "watched" in runs[0].text() and "watched" not in runs[1].text()


def test_an_error_of_the_doctor_is_one_line(server, tmp_path):
    """Here its own, of a script that takes a part of it away."""
    shutil.copytree(LOOPS, tmp_path / "loops", ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "loops" / "plain_ddpm.py"
    script.write_text("import steady_doctor.doctor\nsteady_doctor.doctor.identify = None\n" + script.read_text())
    words = ["--watch_dir", tmp_path / "seen", "--fail_on", "critical"]
    [run] = server.start(["diagnose.py", *words, "--watch", script, 6])
    assert run.wait(100) == 2
    assert run.text().count("the doctor stopped, the script goes on: TypeError") == 1 and run.text().count("0x") == 6
    assert "The doctor stopped before the script did" in (tmp_path / "seen" / "report.html").read_text()


def test_a_full_disk_is_one_line(server, tmp_path):
    """Each write fails as on a full disk, from the second look on; the script and its status stay as they are."""
    script = tmp_path / "train.py"
    full = "import sys, pathlib\nsys.path.append(sys.argv[2])\n"
    full += "def write_text(path, text):\n    raise OSError(28, 'No space left on device')\n"
    script.write_text(full + "pathlib.Path.write_text = write_text\nimport plain_ddpm\nplain_ddpm.main()\n")
    [run] = server.start(["diagnose.py", "--watch_dir", tmp_path / "seen", "--watch", script, 6, LOOPS])
    assert run.wait(100) == 0
    assert run.text().count("0x") == 6 and run.text().count("no report: cannot write") == 1
    assert "No space left on device" in run.text() and run.text().endswith("nothing found\n")
    assert sorted(path.name for path in (tmp_path / "seen").iterdir()) == ["diagnosis.json", "report.html"]


def test_threads_of_process_groups_get_time_at_the_end(monkeypatch, tmp_path):
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    for size in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", size)
        Result(tmp_path).finish(ended=True)
    assert waited == [SETTLING]


OWN_MODULE = """
import sys
from pathlib import Path
import utils
assert Path(utils.__file__).parent == Path(__file__).parent and Path(__file__).is_absolute()
assert sys.modules["__main__"].Path is Path
sys.path.append(sys.argv[1])
sys.argv[1:] = ["3"]
import plain_ddpm
plain_ddpm.main()
assert not {"diffusers", "accelerate", "datasets", "transformers"} & set(sys.modules)
"""


def own_module(folder: Path) -> Path:
    """A script beside a module that has the name of one of ours."""
    folder.mkdir()
    (folder / "utils.py").write_text("")
    (folder / "train.py").write_text(OWN_MODULE)
    return folder / "train.py"


def alone(folder: Path, *command, path: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def test_without_the_trainer(tmp_path):
    """As a module, by its path alone: in a folder whose modules have the names of ours, and without the trainer's libraries."""
    script = own_module(tmp_path / "own")
    words = ["-m", "steady_doctor", "--watch_updates", 2, "--fail_on", "warning", "train.py", LOOPS]
    run = alone(script.parent, *words, path=LOOPS.parents[1])
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("0x") == 2 and "watched: 2 updates of Network" in run.stdout
    assert (script.parent / "watch" / "train" / "report.html").exists()
    refused = alone(script.parent, "-m", "steady_doctor", "--watch_updates", 0, "train.py", path=LOOPS.parents[1])
    assert refused.returncode == 2 and "at least 1" in refused.stderr


def test_modules_of_the_script_that_have_our_names(tmp_path):
    script = own_module(tmp_path / "own")
    run = alone(tmp_path, LOOPS.parents[1] / "diagnose.py", "--watch", script, LOOPS, path=tmp_path)
    assert "watched: 3 updates of Network" in run.stdout, run.stderr
    assert [line for line in run.stderr.splitlines() if "Error" in line] == []


@pytest.mark.slow
def test_as_pip_installs_it(tmp_path):
    pytest.importorskip("setuptools", minversion="77")  # without a network, what is here has to build it
    root, tree, target = LOOPS.parents[1], tmp_path / "tree", tmp_path / "target"
    for name in ("models", "utils", "steady_doctor"):
        shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*root.glob("*.py"), *root.glob("*.toml"), root / "requirements.txt", root / "README.md", root / "LICENSE"):
        shutil.copy(path, tree)
    pip = alone(tree, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", target, ".", path=tmp_path)
    assert pip.returncode == 0, pip.stderr
    script = own_module(tmp_path / "own")
    run = alone(script.parent, "-m", "steady_doctor", "train.py", LOOPS, path=target)
    assert run.returncode == 0 and "watched: 3 updates of Network" in run.stdout, run.stderr
    code = "from steady_diffusion.utils.core.commands import diagnose; diagnose()"
    run = alone(script.parent, "-c", code, "--watch", "train.py", LOOPS, path=target)
    assert run.returncode == 0 and "watched: 3 updates of Network" in run.stdout, run.stderr


@pytest.mark.parametrize("part", ["step", *slow_turns("optimizer", "later", "module", "inplace")])
def test_what_torch_compiles_runs_as_before(part, tmp_path):
    """In a process of its own, which has not imported torch's compiler before the hooks are there."""
    words = [[], [str(LOOPS.parents[1] / "diagnose.py"), "--watch_dir", str(tmp_path), "--watch"]]
    losses, runs = [], []
    for before in words:
        command = [sys.executable, *before, str(LOOPS / "compiled_loop.py"), part]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        losses.append([line for line in run.stdout.splitlines() if line.startswith("loss")])
        runs.append(int(run.stdout.split("compiled runs: ")[1].split()[0]))
        assert ("doctor stopped" in run.stderr) == bool(before and part == "later") and "Warning" not in run.stderr
    assert len(losses[0]) == 24 == len(losses[1])
    first, second = ([float(line.split()[1]) for line in one] for one in losses)
    assert first == pytest.approx(second, rel=1e-4)  # updates that are looked at run eagerly, and round otherwise
    if part == "later":  # the second update is being recorded, and has two compiled parts, one before the backward pass
        assert "the step of the optimizer is compiled" in run.stderr and runs == [2 * 23, 2 * (23 - 1)]
    elif part == "optimizer":  # of which the doctor sees what it writes, from one backward pass to the next: two of its steps
        assert "watched: 23 updates of" in run.stdout and "weights written by the script itself" in run.stdout
        assert runs == [24, 24 - 10]
    else:
        assert runs == [24, 24 - 6]  # as all others do not: 2, 3, 5, 8, 13 and 21 are looked at
        assert "watched: 24 updates of Network; variance-preserving path, epsilon" in run.stdout
