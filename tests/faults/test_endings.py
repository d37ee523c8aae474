"""What a run says and leaves when something goes wrong outside its updates: before the first, and after the last."""

import errno
import os
import signal

import pytest
from conftest import slow_turns

from benchmarks.shared.replace import replace_everywhere
from utils.runs.checkpoint_files import verify_checkpoint
from utils.runs.state import read_state


def full_disk(*arguments, **keywords):
    raise OSError(errno.ENOSPC, "No space left on device")


def exit_status(folder) -> int:
    return int((folder / "exit_status").read_text())


@pytest.mark.parametrize("number", ["SIGTERM", *slow_turns("SIGINT", "SIGUSR1")])
def test_a_signal_before_the_first_update_is_a_stop_and_no_crash(server, script, script_flags, tmp_path, number):
    fault = ["signal-in-setup", "--value", number, "--", *script_flags, "--output_dir", tmp_path]
    said = server.run(["tests/faults/inject.py", script, *fault], ends=75)
    assert not list(tmp_path.glob("checkpoint-*")) and "Traceback" not in said


@pytest.mark.parametrize("number", ["SIGTERM", *slow_turns("SIGINT", "SIGUSR1")])
def test_a_signal_while_the_images_are_checked_ends_the_run_at_once(server, script, script_flags, tmp_path, number):
    fault = ["signal-in-check", "--value", number, "--", *script_flags, "--output_dir", tmp_path]
    said = server.run(["tests/faults/inject.py", script, *fault], ends=75)
    assert said.count(f"{number}: stopped before the first update") == 1 and "Traceback" not in said
    assert not list(tmp_path.glob("checkpoint-*")) and exit_status(tmp_path) == 75 and "update 1 of" not in said


def test_a_stop_that_could_not_save_is_no_stop_to_run_again(train_script, script_flags, tmp_path, monkeypatch, capsys):
    import utils.runs.checkpoints
    import utils.training.progress

    update, done = utils.training.progress.ProgressBar.update, []

    def stop_after_three(bar):
        done.append(update(bar))
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(utils.training.progress.ProgressBar, "update", stop_after_three)
    monkeypatch.setattr(utils.runs.checkpoints, "_publish", full_disk)
    assert train_script([*script_flags, "--output_dir", tmp_path]) == 1
    said = capsys.readouterr()
    assert "checkpoint-3 was not saved" in said.out + said.err
    assert "continue with" not in said.out + said.err and exit_status(tmp_path) == 1


def test_a_finished_run_without_its_last_picture_is_finished(train_script, script_flags, tmp_path, monkeypatch, capsys):
    import utils.training.samples

    monkeypatch.setattr(utils.training.samples, "save_png", full_disk)
    assert train_script([*script_flags, "--output_dir", tmp_path]) == 0
    said = capsys.readouterr()
    assert "left out: the samples after 8 updates: No space left on device" in said.out + said.err
    assert (tmp_path / "model_index.json").exists() and exit_status(tmp_path) == 0


def test_a_pipeline_that_cannot_be_written_costs_no_update(train_script, script_flags, tmp_path, monkeypatch):
    replace_everywhere("utils.diffusion.export.export_pipeline", full_disk, monkeypatch)
    assert train_script([*script_flags, "--adaptive_clipping", "--output_dir", tmp_path]) == 1
    assert verify_checkpoint(tmp_path / "checkpoint-8") is None and exit_status(tmp_path) == 1
    assert read_state(tmp_path / "checkpoint-8").grad_norm_mean > 0


def test_a_run_that_is_killed_has_the_report_of_its_last_preview(train, tiny_flags, tmp_path, monkeypatch):
    import utils.training.progress

    class Killed(BaseException):
        pass

    def kill_after_six(bar):
        bar._step += 1
        if bar._step == 6:
            raise Killed

    monkeypatch.setattr(utils.training.progress.ProgressBar, "update", kill_after_six)
    with pytest.raises(Killed):
        train([*tiny_flags, "--save_images_steps", "2", "--output_dir", tmp_path])
    page = (tmp_path / "report.html").read_text()
    assert "Not finished" in page and "4 of 8 updates" in page and "After 4 updates" in page
