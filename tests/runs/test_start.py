"""The table of docs/reliability.md: which start is refused, goes on, begins anew or has nothing to do, in which folder."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from utils.core.errors import UserError
from utils.options.flags import DDPMOptions, EDM2Options
from utils.options.parser import parse_options
from utils.options.paths import located
from utils.runs.checkpoint_files import FORMAT, find_checkpoint
from utils.runs.folder import RunFolder
from utils.runs.start import Start, nothing_to_do, start_of

FLAGS = ["--dataset_name", "digits", "--max_train_steps", "8", "--learning_rate", "1e-3"]
LATEST, BEST, NAMED = (["--resume_from_checkpoint", wanted] for wanted in ("latest", "best", "checkpoint-4"))
OVER = ["--overwrite_output_dir"]
LAUNCHED = {"global_batch_size": 16, "mixed_precision": "no"}


def options(folder: Path, *more: str) -> DDPMOptions:
    return parse_options(DDPMOptions, "", [*FLAGS, "--output_dir", str(folder), *more])


def record(folder: Path) -> None:
    """What `write_options` leaves, written down a second time."""
    content = {"options": options(folder).recorded(), "resolved": {**LAUNCHED, "max_train_steps": 8, "updates_per_epoch": 4}}
    (folder / "options.json").write_text(json.dumps(content | {"working_dir": os.getcwd()}))
    (folder / "history.jsonl").write_text('{"step": 1}\n')


def checkpoint(folder: Path, step: int, best: int | None = None) -> None:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    shaping = options(folder).shaping(**LAUNCHED)
    (path / "state.json").write_text(json.dumps({"step": step, "options": shaping, "best_step": best, "fingerprint": "f"}))
    (path / "model.safetensors").write_bytes(b"weights")
    files = {
        file.name: {"size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in path.iterdir()
    }
    (path / "MANIFEST.json").write_text(json.dumps({"format": FORMAT, "step": step, "files": files}))


def empty(folder: Path) -> None:
    pass


def foreign(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def finished(folder: Path) -> None:
    record(folder)
    (folder / "exit_status").write_text("0\n")
    (folder / "model_index.json").write_text("{}")


def finished_with_checkpoints(folder: Path) -> None:
    finished(folder)
    checkpoint(folder, 4, best=4)


def stopped_with_checkpoints(folder: Path) -> None:
    record(folder)
    checkpoint(folder, 4, best=4)


def killed_early(folder: Path) -> None:
    """Before the first checkpoint, and after the first export."""
    record(folder)
    (folder / "model_index.json").write_text("{}")


def of_another_tool(folder: Path) -> None:
    (folder / "model_index.json").write_text("{}")


def corrupt(folder: Path) -> None:
    finished_with_checkpoints(folder)
    (folder / "checkpoint-4" / "MANIFEST.json").unlink()


HAS_A_RUN = "already has a run"
NO_CHECKPOINT = "has no (such|best) checkpoint"
OTHER = r"(?s)learning_rate: 0.001 (in the checkpoint|there), 0.002 now.*(--overwrite_output_dir|use the checkpoint's values)"
TABLE = [  # folder, flags -> with the same options, with another learning rate; text: what a UserError says
    (empty, [], Start.NEW, Start.NEW),
    (empty, LATEST, Start.ON, Start.ON),
    (empty, BEST, NO_CHECKPOINT, NO_CHECKPOINT),
    (empty, NAMED, NO_CHECKPOINT, NO_CHECKPOINT),
    (empty, OVER, Start.NEW, Start.NEW),
    (foreign, [], Start.NEW, Start.NEW),
    (foreign, LATEST, Start.ON, Start.ON),
    (foreign, BEST, NO_CHECKPOINT, NO_CHECKPOINT),
    (foreign, NAMED, NO_CHECKPOINT, NO_CHECKPOINT),
    (foreign, OVER, Start.NEW, Start.NEW),
    (stopped_with_checkpoints, [], HAS_A_RUN, HAS_A_RUN),
    (stopped_with_checkpoints, LATEST, Start.ON, OTHER),
    (stopped_with_checkpoints, BEST, Start.ON, OTHER),
    (stopped_with_checkpoints, NAMED, Start.ON, OTHER),
    (stopped_with_checkpoints, OVER, Start.NEW, Start.NEW),
    (stopped_with_checkpoints, LATEST + OVER, Start.ON, OTHER),
    (finished_with_checkpoints, [], HAS_A_RUN, HAS_A_RUN),
    (finished_with_checkpoints, LATEST, Start.DONE, OTHER),
    (finished_with_checkpoints, BEST, Start.ON, OTHER),
    (finished_with_checkpoints, NAMED, Start.ON, OTHER),
    (finished_with_checkpoints, OVER, Start.NEW, Start.NEW),
    (finished_with_checkpoints, LATEST + OVER, Start.DONE, OTHER),
    (finished, [], HAS_A_RUN, HAS_A_RUN),
    (finished, LATEST, Start.DONE, OTHER),
    (finished, BEST, NO_CHECKPOINT, NO_CHECKPOINT),
    (finished, NAMED, NO_CHECKPOINT, NO_CHECKPOINT),
    (finished, OVER, Start.NEW, Start.NEW),
    (finished, LATEST + OVER, Start.DONE, Start.NEW),
    (killed_early, [], HAS_A_RUN, HAS_A_RUN),
    (killed_early, LATEST, Start.ON, OTHER),
    (killed_early, BEST, NO_CHECKPOINT, NO_CHECKPOINT),
    (killed_early, NAMED, NO_CHECKPOINT, NO_CHECKPOINT),
    (killed_early, OVER, Start.NEW, Start.NEW),
    (killed_early, LATEST + OVER, Start.ON, Start.NEW),
    (of_another_tool, [], HAS_A_RUN, HAS_A_RUN),
    (of_another_tool, LATEST, "no options.json that says", "no options.json that says"),
    (of_another_tool, BEST, NO_CHECKPOINT, NO_CHECKPOINT),
    (of_another_tool, NAMED, NO_CHECKPOINT, NO_CHECKPOINT),
    (of_another_tool, OVER, Start.NEW, Start.NEW),
    (of_another_tool, LATEST + OVER, Start.NEW, Start.NEW),
    (corrupt, [], HAS_A_RUN, HAS_A_RUN),
    (corrupt, LATEST, "has no valid checkpoint", "has no valid checkpoint"),
    (corrupt, BEST, NO_CHECKPOINT, NO_CHECKPOINT),
    (corrupt, NAMED, "cannot resume from", "cannot resume from"),
    (corrupt, OVER, Start.NEW, Start.NEW),
    (corrupt, LATEST + OVER, "has no valid checkpoint", "has no valid checkpoint"),
]


@pytest.mark.parametrize(
    ("make", "flags", "same", "other"), TABLE, ids=[f"{row[0].__name__}{''.join(row[1][1:])}{len(row[1])}" for row in TABLE]
)
def test_every_cell(tmp_path, make, flags, same, other):
    make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for changed, expected in (([], same), (["--learning_rate", "2e-3"], other)):
        asked = options(tmp_path, *flags, *changed)
        for launched in (None, LAUNCHED):  # before the libraries are loaded, and after
            if isinstance(expected, Start):
                assert start_of(asked, launched) is expected
            else:
                with pytest.raises(UserError, match=expected):
                    start_of(asked, launched)
                    find_checkpoint(tmp_path, flags[-1] if flags[-1:] != OVER else flags[1])  # what the run does next
    assert before == {path: path.read_bytes() for path in before}


def test_a_requeued_job_whose_run_is_done_is_told_so_and_another_start_is_not(tmp_path):
    finished_with_checkpoints(tmp_path)
    assert nothing_to_do(options(tmp_path, *LATEST)) == (
        f"finished: the run in {tmp_path} has come to its end with these options, and stays as it is"
    )
    for more in (["--max_train_steps", "9"], ["--save_images_steps", "3"], ["--num_epochs", "3"], ["--push_to_hub"]):
        assert nothing_to_do(options(tmp_path, *LATEST, *more)) is None
    assert nothing_to_do(options(tmp_path, "--dry_run")) is None


def test_a_finished_run_without_checkpoints_cannot_become_longer_but_a_shorter_one_is_done(tmp_path):
    finished(tmp_path)
    with pytest.raises(UserError, match="max_train_steps: 8 there, 9 now"):
        start_of(options(tmp_path, *LATEST, "--max_train_steps", "9"))
    for length in (["--max_train_steps", "7"], ["--num_epochs", "2"]):
        assert start_of(options(tmp_path, *LATEST, *length), LAUNCHED) is Start.DONE
    with pytest.raises(UserError, match="num_epochs: 100 there, 3 now"):  # 4 updates each
        start_of(
            parse_options(
                DDPMOptions, "", [*FLAGS[:2], *FLAGS[4:], "--num_epochs", "3", "--output_dir", str(tmp_path), *LATEST]
            )
        )
    assert start_of(options(tmp_path, *LATEST, "--save_images_steps", "3"), LAUNCHED) is Start.DONE  # a picture is no reason
    larger = options(tmp_path, *LATEST, "--train_batch_size", "24")
    assert nothing_to_do(larger) is None
    with pytest.raises(UserError, match="global_batch_size: 16 there, 32 now"):
        start_of(larger, LAUNCHED | {"global_batch_size": 32})


def test_a_resume_that_leaves_out_what_the_run_began_with_says_so_first(tmp_path):
    """The defaults that --pretrained would have changed are not the reason."""
    record(tmp_path)
    checkpoint(tmp_path, 4)
    state = json.loads((tmp_path / "checkpoint-4/state.json").read_text())
    state["options"] |= {"pretrained": "some/pipeline", "vae": "some/vae"}
    (tmp_path / "checkpoint-4/state.json").write_text(json.dumps(state))
    manifest = json.loads((tmp_path / "checkpoint-4/MANIFEST.json").read_text())
    content = (tmp_path / "checkpoint-4/state.json").read_bytes()
    manifest["files"]["state.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "checkpoint-4/MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="pretrained: some/pipeline in the checkpoint, None now\n  vae: some/vae in"):
        start_of(options(tmp_path, *LATEST))
    flags = ["--dataset_name", "digits", "--output_dir", str(tmp_path), *LATEST, "--pretrained", "moved/pipeline"]
    assert start_of(parse_options(DDPMOptions, "", flags)) is Start.ON


def test_a_folder_that_cannot_be_looked_at_is_one_line():
    with pytest.raises(UserError, match=r"cannot use --output_dir x+: File name too long\nchoose another --output_dir"):
        nothing_to_do(options(Path("x" * 300)))


def test_several_processes_decide_together_that_there_is_nothing_to_do(tmp_path, monkeypatch):
    finished(tmp_path)
    assert nothing_to_do(options(tmp_path, *LATEST)).startswith("finished: ")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert nothing_to_do(options(tmp_path, *LATEST)) is None


def test_the_digits_of_scikit_learn_are_no_folder(tmp_path, monkeypatch):
    """Though a folder is called so: that of the run."""
    monkeypatch.chdir(tmp_path)
    run = Path("digits")
    run.mkdir()
    record(run)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    saved = json.loads((tmp_path / run / "options.json").read_text())
    assert located(saved, tmp_path / run, ["dataset_name"])["dataset_name"] == "digits"


def test_a_history_whose_options_are_lost_is_not_replaced(tmp_path):
    killed_early(tmp_path)
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "options.json").write_text("{")
    with pytest.raises(UserError, match="that says of which run"):
        start_of(options(tmp_path, *LATEST))
    (tmp_path / "options.json").unlink()
    with pytest.raises(UserError, match=r"already has a run \(history.jsonl\)"):
        start_of(options(tmp_path))


def test_a_start_that_comes_to_nothing_leaves_a_finished_run_finished(tmp_path):
    finished(tmp_path)
    folder = RunFolder(tmp_path)
    folder.claim(replaces=True)
    assert folder.is_done()
    folder.begin(options(tmp_path), {})
    assert not folder.is_done() and not (tmp_path / "model_index.json").exists()
    folder.release(75)
    folder.claim(replaces=False)
    assert not (tmp_path / "exit_status").exists()
    folder.release(0)


def test_a_run_of_the_other_script_is_told_in_two_lines(tmp_path):
    checkpoint(tmp_path, 5)
    asked = parse_options(EDM2Options, "", [*FLAGS, "--output_dir", str(tmp_path), *LATEST])
    with pytest.raises(UserError, match=r"checkpoint-5 is of train_ddpm.py, and this is train_edm2.py\ncontinue it with"):
        start_of(asked)


@pytest.mark.parametrize("inside", ["", "runs/a"])
def test_a_run_inside_its_data_is_refused(inside, tmp_path):
    with pytest.raises(UserError, match=r"is in --train_data_dir: its samples would become images of the data\nchoose"):
        RunFolder(tmp_path / "photos" / inside).claim(replaces=False, inputs={"train_data_dir": str(tmp_path / "photos")})
    RunFolder(tmp_path / "beside").claim(replaces=False, inputs={"train_data_dir": str(tmp_path / "photos")})


# ---- paths


@pytest.fixture
def project(tmp_path, monkeypatch):
    """project/photos, and project/job/runs/a, the run, started in project/job with --train_data_dir ../photos/"""
    (tmp_path / "project" / "photos").mkdir(parents=True)
    (tmp_path / "project" / "job" / "runs" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "project" / "job")
    start = ["--train_data_dir", "../photos/", "--resolution", "32", "--output_dir", "runs/a"]
    folder = RunFolder(Path("runs/a"))
    folder.write_options(parse_options(DDPMOptions, "", start), LAUNCHED)
    return tmp_path, start


def from_record(folder: Path, *more: str) -> DDPMOptions:
    return parse_options(DDPMOptions, "", ["--config", str(folder / "options.json"), *more])


def test_the_record_of_a_run_means_the_same_from_everywhere(project, monkeypatch):
    place, _ = project
    here = from_record(Path("runs/a"))
    assert (here.train_data_dir, here.output_dir) == ("../photos/", "runs/a")  # as it was written
    monkeypatch.chdir(place / "elsewhere")
    there = from_record(place / "project/job/runs/a", *LATEST)
    assert (there.train_data_dir, there.output_dir) == (str(place / "project/photos"), str(place / "project/job/runs/a"))
    assert start_of(there, LAUNCHED) is Start.ON
    (place / "project").rename(place / "moved")
    moved = from_record(place / "moved/job/runs/a", *LATEST)
    assert (moved.train_data_dir, moved.output_dir) == (str(place / "moved/photos"), str(place / "moved/job/runs/a"))
    assert start_of(moved, LAUNCHED) is Start.ON
    RunFolder(place / "moved/job/runs/a").write_options(moved, LAUNCHED)  # now with absolute paths
    (place / "moved").rename(place / "again")
    again = from_record(place / "again/job/runs/a")
    assert (again.train_data_dir, again.output_dir) == (str(place / "again/photos"), str(place / "again/job/runs/a"))
    (place / "again").rename(place / "moved")


def test_a_run_that_was_moved_alone_finds_its_data_where_they_were(project, monkeypatch):
    place, _ = project
    monkeypatch.chdir(place / "elsewhere")
    shutil.copy(place / "project/job/runs/a/options.json", place / "elsewhere")  # as a file for --config
    assert from_record(place / "elsewhere").output_dir == str(place / "project/job/runs/a")
    shutil.move(place / "project/job/runs/a", place / "a")
    assert from_record(place / "a").train_data_dir == str(place / "project/photos")
    shutil.rmtree(place / "project")
    assert from_record(place / "a").train_data_dir == "../photos/"


def test_a_relative_path_that_is_nothing_here_says_where_it_was(project, monkeypatch):
    place, start = project
    run = place / "project/job/runs/a"
    monkeypatch.chdir(place / "elsewhere")
    words = [*start[:-1], str(run), *LATEST]
    with pytest.raises(UserError) as caught:
        start_of(parse_options(DDPMOptions, "", words))
    assert str(caught.value).splitlines() == [
        f"--train_data_dir ../photos/: there is no such file or folder in {place}/elsewhere, and the run in {run} was started "
        f"in {place}/project/job",
        f"set --train_data_dir {place}/project/photos",
    ]
    record = json.loads((run / "options.json").read_text())
    del record["working_dir"]  # of an earlier version
    (run / "options.json").write_text(json.dumps(record))
    assert start_of(parse_options(DDPMOptions, "", words)) is not None


def test_the_same_folder_by_another_spelling_is_the_same(project, monkeypatch):
    place, start = project
    run = place / "project/job/runs/a"
    (place / "link").symlink_to(place / "project/photos")
    (place / "others").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    for spelled in (place / "project/photos", "../project/photos/.", place / "link"):
        words = ["--train_data_dir", str(spelled), *start[2:-1], str(run), *LATEST]
        assert start_of(parse_options(DDPMOptions, "", words), LAUNCHED) is Start.ON
    with pytest.raises(UserError, match=r"train_data_dir: \.\./photos/ there, \.\./others now"):
        start_of(parse_options(DDPMOptions, "", ["--train_data_dir", "../others", *start[2:-1], str(run), *LATEST]), LAUNCHED)
