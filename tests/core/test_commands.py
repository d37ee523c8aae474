"""What `pip install .` gives: each script as a command that runs it as a clone does."""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, run_command, script_environment

from utils.core import commands, entrypoint

SCRIPTS = ["train_ddpm", "train_edm2", "generate", "evaluate", "diagnose", "reconstruct_ema"]


def test_each_script_is_a_command():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert list(named) == [f"steady-{script.replace('_', '-')}" for script in SCRIPTS]
    for script, target in zip(SCRIPTS, named.values()):
        module, function = target.split(":")
        assert module == f"steady_diffusion.{commands.__name__}" and function == script
        assert (commands.HOME / getattr(commands, function).args[0]).samefile(ROOT / f"{script}.py")


def test_windows_is_refused_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        importlib.reload(entrypoint)
    assert ended.value.code == 2 and capsys.readouterr().err == "error: Windows is not supported: use Linux, or WSL 2\n"


@pytest.mark.slow
def test_installed_commands_train_with_two_processes_beside_a_utils_of_others(tiny_flags, tmp_path):
    source, packages, elsewhere = tmp_path / "source", tmp_path / "packages", tmp_path / "elsewhere"
    for name in ("utils", "models"):
        shutil.copytree(ROOT / name, source / name)
    for path in (*ROOT.glob("*.py"), *(ROOT / name for name in ("pyproject.toml", "requirements.txt", "README.md"))):
        shutil.copy(path, source)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*install, "--target", packages, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    Path(elsewhere, "utils").mkdir(parents=True)
    Path(elsewhere, "utils", "__init__.py").write_text("raise SystemExit('the wrong one')")
    environment = script_environment(2) | {"PYTHONPATH": os.pathsep.join([str(packages), str(elsewhere)])}
    command = packages / "bin" / "steady-train-ddpm"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = [*tiny_flags, "--train_batch_size", 4, "--max_train_steps", 2, "--output_dir", tmp_path / "run"]
    done = run_command([*launcher, command, *flags], environment)
    assert done.returncode == 0 and "num_processes 2" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "run" / "model_index.json").exists()
    helped = run_command([packages / "bin" / "steady-evaluate", "--help"], environment)
    assert helped.returncode == 0 and "--pipeline" in helped.stdout
    assert helped.stdout.startswith("usage: steady-evaluate ")
