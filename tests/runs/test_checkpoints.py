import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from utils.core.errors import UserError
from utils.optim.ema import EMA
from utils.runs import checkpoint_files, checkpoints
from utils.runs.checkpoint_files import find_checkpoint, list_checkpoints, verify_checkpoint
from utils.runs.checkpoints import (
    TrainState,
    attach_state_hooks,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)

MOVES = ((os, "rename"), (shutil, "rmtree"))


class Run:
    """An accelerator with a model, an optimizer that has state, an EMA and a TrainState."""

    def __init__(self, seed: int = 0):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
        self.ema = EMA(self.accelerator.unwrap_model(self.model))
        self.state = TrainState(options={"seed": seed})
        attach_state_hooks(self.accelerator, self.ema, self.state)
        self.update()

    def update(self) -> None:
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(0.5, torch.tensor(True))
        self.state.step += 1

    def save(self, folder: Path, **options) -> str | None:
        return save_checkpoint(self.accelerator, folder, self.state, **options)

    def everything(self) -> list[torch.Tensor]:
        optimizer = [t for s in self.optimizer.state_dict()["state"].values() for t in s.values()]
        return [*self.model.state_dict().values(), *self.ema.shadow.values(), *optimizer]


@pytest.fixture
def run():
    yield Run()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def saved(run, tmp_path) -> Path:
    assert run.save(tmp_path) is None
    return tmp_path / "checkpoint-1"


def test_what_is_saved_comes_back(run, tmp_path):
    run.state.best_value = 0.25
    run.save(tmp_path)
    expected = [tensor.clone() for tensor in run.everything()]
    other = Run(seed=7)
    assert not torch.equal(expected[0], other.everything()[0])
    load_checkpoint(other.accelerator, tmp_path / "checkpoint-1")
    assert all(torch.equal(a, b) for a, b in zip(expected, other.everything()))
    assert (other.state.step, other.state.best_value) == (1, 0.25)
    assert other.state.options == {"seed": 7}  # what the new run was told, not what the old one was


def test_names_are_clean_and_no_pickle_but_torchs_own(saved):
    from safetensors import safe_open

    with safe_open(saved / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert {path.name for path in saved.iterdir()} == {
        *("MANIFEST.json", "state.json", "model.safetensors", "ema.safetensors"),
        *("optimizer.bin", "random_states_0.pkl"),
    }


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_every_damaged_file_is_noticed(saved, damage):
    for file in sorted(saved.iterdir()):
        content = file.read_bytes()
        if damage == "truncate":
            file.write_bytes(content[: len(content) // 2])
        elif damage == "flip":
            file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        else:
            file.unlink()
        assert verify_checkpoint(saved) is not None, file.name
        file.write_bytes(content)
        assert verify_checkpoint(saved) is None


def test_a_failure_that_does_not_name_the_disk_says_how_much_is_free(run, tmp_path, monkeypatch):
    def full(*arguments, **keywords):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    assert " MB free on the disk)" in run.save(tmp_path) and list_checkpoints(tmp_path) == []


def test_a_bit_that_flips_anywhere_in_the_manifest_is_noticed(saved):
    manifest = saved / "MANIFEST.json"
    content = manifest.read_bytes()
    for place, byte in enumerate(content):
        manifest.write_bytes(content[:place] + bytes([byte ^ 1 << place % 8]) + content[place + 1 :])
        assert verify_checkpoint(saved) is not None, (place, content[place - 9 : place + 9])


def test_manifest_that_points_outside_is_refused(saved):
    manifest = json.loads((saved / "MANIFEST.json").read_text())
    manifest["files"]["../secret"] = {"size": 0, "sha256": ""}
    (saved / "MANIFEST.json").write_text(json.dumps(manifest))
    assert "outside the checkpoint" in verify_checkpoint(saved)


def test_latest_takes_the_newest_valid_one_and_names_the_others(run, tmp_path):
    for _ in range(3):
        run.save(tmp_path)
        run.update()
    (tmp_path / "checkpoint-3" / "optimizer.bin").write_bytes(b"")
    (tmp_path / "checkpoint-9").mkdir()
    path, skipped = find_checkpoint(tmp_path, "latest")
    assert path.name == "checkpoint-2"
    assert ["checkpoint-9" in skipped[0], "checkpoint-3" in skipped[1]] == [True, True]
    with pytest.raises(UserError, match=r"optimizer\.bin has 0 bytes"):
        find_checkpoint(tmp_path, "checkpoint-3")


def test_latest_of_a_new_folder_is_none_but_of_a_ruined_one_an_error(saved, tmp_path):
    assert find_checkpoint(tmp_path / "new", "latest") == (None, [])
    (saved / "state.json").write_text("{}")
    with pytest.raises(UserError, match="no valid checkpoint"):
        find_checkpoint(tmp_path, "latest")


def test_a_checkpoint_of_another_script_is_known_and_its_folder_is_not_to_be_overwritten(saved, tmp_path):
    (saved / "MANIFEST.json").unlink()
    for wanted in ("latest", str(saved)):
        with pytest.raises(UserError, match=r"no MANIFEST\.json: it was never completed"):
            find_checkpoint(tmp_path, wanted)
    (saved / "unet").mkdir()
    for wanted in ("latest", str(saved)):
        with pytest.raises(UserError, match=r"written by another script.*\nstart from the pipeline .* another --output_dir$"):
            find_checkpoint(tmp_path, wanted)
    for name, advice in (("model_index.json", "with --pretrained "), ("options.json", "with --output_dir .* latest$")):
        (saved / name).touch()
        with pytest.raises(UserError, match=rf"the folder of a run or of a pipeline\n.*{advice}"):
            find_checkpoint(tmp_path, str(saved))


def test_unknown_checkpoint_lists_those_there(saved, tmp_path):
    with pytest.raises(UserError, match="choose from: checkpoint-1"):
        find_checkpoint(tmp_path, "checkpoint-5")


@pytest.mark.parametrize(
    ("module", "function", "error"),
    [
        (checkpoints, "save_file", OSError(28, "No space left on device")),
        (checkpoints, "save_file", RuntimeError("write failed")),
        (os, "rename", OSError(30, "Read-only file system")),
    ],
)
def test_a_failed_save_says_so_and_harms_nothing(run, saved, tmp_path, monkeypatch, module, function, error):
    def fail(*args, **kwargs):
        raise error

    run.update()
    monkeypatch.setattr(module, function, fail)
    assert str(error.args[-1]) in run.save(tmp_path, total_limit=1)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert verify_checkpoint(saved) is None


def test_killed_between_any_two_steps_leaves_valid_checkpoints_only(run, saved, tmp_path, monkeypatch):
    """Dies before each call that touches the disk while publishing, as a kill would: no clean-up runs."""

    class Killed(BaseException):
        pass

    calls = 0

    def dies_at(count, function):
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == count:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    run.update()
    published, moments = [], 0
    for moment in range(1, 100):
        calls = 0
        with monkeypatch.context() as patch:
            for module, name in (*((checkpoints, of_file) for of_file in ("save_file", "file_sha256", "sync")), *MOVES):
                patch.setattr(module, name, dies_at(moment, getattr(module, name)))
            try:
                run.save(tmp_path, total_limit=2)
                break
            except Killed:
                moments += 1
        published.append(len(list_checkpoints(tmp_path)))
        for path in list_checkpoints(tmp_path):
            assert verify_checkpoint(path) is None, f"moment {moment}"
        assert find_checkpoint(tmp_path, "latest")[0] is not None
    assert moments > 10 and set(published) == {1, 2}
    assert not list(tmp_path.glob(".tmp-*"))  # the save that came through has cleared what the killed ones left


def test_pruning_keeps_the_newest_two_and_the_best(run, tmp_path):
    for step in range(1, 6):
        run.state.step = step
        run.state.best_step = 2 if step >= 2 else None
        run.save(tmp_path, total_limit=1)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    prune_checkpoints(tmp_path, None, newest_step=5)
    assert len(list_checkpoints(tmp_path)) == 3


def test_a_branch_that_was_left_is_removed_and_never_the_new_one(run, tmp_path):
    for step in (4, 8, 12, 16):
        run.state.step = step
        run.save(tmp_path)
    run.state.step = 6  # resumed from 4
    run.save(tmp_path, total_limit=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-6"]
    run.state.step = 8
    run.save(tmp_path, total_limit=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-8"]


def test_best_hashes_the_newest_valid_checkpoint_and_itself_alone(run, tmp_path, monkeypatch):
    for step in (1, 2, 3, 4):
        run.state.step = step
        run.state.best_step = 2 if step >= 2 else None
        run.save(tmp_path)
    (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"damaged")
    seen, verify = [], checkpoint_files.verify_checkpoint

    def noted(path, **how):
        seen.append(path.name)
        return verify(path, **how)

    monkeypatch.setattr(checkpoint_files, "verify_checkpoint", noted)
    assert find_checkpoint(tmp_path, "best")[0].name == "checkpoint-2"
    assert seen == ["checkpoint-4", "checkpoint-3", "checkpoint-2"]


def test_a_checkpoint_without_a_loss_scale_is_taken_by_a_run_with_one(run, saved):
    saved_tensors = [tensor.clone() for tensor in run.everything()]
    other = Run(seed=1)
    other.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    load_checkpoint(other.accelerator, saved)
    assert all(map(torch.equal, other.everything(), saved_tensors))
    assert other.accelerator.scaler is scaler and scaler.get_scale() == 1024.0


def test_early_stopping_counts_validations_without_gain():
    state = TrainState()
    improved = [state.record("validation loss", loss, decides=True) for loss in (3.0, 2.0, 2.5, float("nan"), 1.0, 1.0)]
    assert improved == [True, True, False, False, True, False]
    assert state.validations_without_improvement == 1
    assert not state.record("fd_randconv", 0.1, decides=False) and state.best_value == 1.0
    assert state.record("fd_randconv", 7.0, decides=True)  # the metric was changed: a loss is no distance
    assert not state.record("fd_randconv", 8.0, decides=True) and state.best_value == 7.0
    assert state.stopped_early(1) and not state.stopped_early(2) and not state.stopped_early(0)


@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
def test_code_hidden_in_a_checkpoint_is_not_run(run, saved, tmp_path, dump):
    """A forged checkpoint with a correct manifest: the loader itself must refuse to execute what it finds."""
    sentinel = tmp_path / "executed"

    class Malicious:
        def __reduce__(self):
            return (os.system, (f"touch {sentinel}",))

    for name in ("optimizer.bin", "random_states_0.pkl", "model.safetensors", "ema.safetensors"):
        forged = saved.with_name("checkpoint-99")
        shutil.copytree(saved, forged)
        with open(forged / name, "wb") as file:
            dump(Malicious(), file)
        manifest = json.loads((forged / "MANIFEST.json").read_text())
        file = forged / name
        manifest["files"][name] = {"size": file.stat().st_size, "sha256": checkpoint_files.file_sha256(file)}
        (forged / "MANIFEST.json").write_text(json.dumps(manifest))
        assert verify_checkpoint(forged) is None
        with contextlib.suppress(Exception):  # Accelerate passes over a random state that it cannot read
            load_checkpoint(run.accelerator, forged)
        assert not sentinel.exists(), name
        shutil.rmtree(forged)
    pickle.loads(pickle.dumps(Malicious()))
    assert sentinel.exists()  # it would have been seen
