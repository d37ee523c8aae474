"""Resuming with other options and on other numbers of processes: refused with a diff, or the same run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import logged_scalars, same_bytes, slow_turns, step_seen
from kills import BYTES, newest, same
from safetensors.torch import load_file

from utils.core.errors import UserError
from utils.runs.checkpoint_files import list_checkpoints
from utils.runs.folder import check_options

TOUCHED = (".lock",)  # by a start that is then refused
INJECT = "tests/faults/inject.py"
STEPS, IMAGES, BATCH = 24, 40, 8
WEIGHTS_TOLERANCE = 1e-3  # relative, per tensor; 1e-4 was measured: Adam enlarges rounding where gradients are tiny


@pytest.fixture(scope="module")
def run_to_resume(server, script, script_flags, tmp_path_factory):
    """Flags of a finished run with checkpoints at 4 and 8, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*script_flags, "--checkpointing_steps", 4, "--output_dir", folder]
    server.run([script, *flags])
    return flags, folder


@pytest.mark.parametrize(
    ("flag", "value", "difference"),
    [
        ("seed", 1, "seed: 0 in the checkpoint, 1 now"),
        ("train_batch_size", 4, "global_batch_size: 8 in the checkpoint, 4 now"),
        ("max_train_images", 100, "max_train_images: None in the checkpoint, 100 now"),
    ],
)
def test_a_changed_option_is_refused_with_a_diff(server, script, run_to_resume, flag, value, difference):
    flags, folder = run_to_resume
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name not in TOUCHED}
    said = server.run([script, *flags, "--resume_from_checkpoint", "checkpoint-4", f"--{flag}", value], ends=2)
    assert difference in said and "--allow_option_change " in said
    assert ("add --global_batch_size 8" in said) is (flag == "train_batch_size")
    assert "Traceback" not in said
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_finished_run_that_is_started_again_stays_as_it_is(server, script, script_flags, tmp_path):
    """Before any library is loaded, on each of two processes; without its checkpoints it is not trained over."""
    flags = [*script_flags, "--max_train_steps", 2, "--checkpointing_steps", 2, "--train_batch_size", 4]
    flags += ["--output_dir", tmp_path]
    server.run([script, *flags], 2)
    resume = [*flags, "--resume_from_checkpoint", "latest"]
    for without_checkpoints in (False, True):
        if without_checkpoints:
            shutil.rmtree(tmp_path / "checkpoint-2")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        said = server.run([script, *resume], 2)
        assert said.count(f"finished: the run in {tmp_path} has come to its end") == 1
        printed = server.run([script, *resume, "--seed", 1], 2, ends=2)
        assert "seed: 0 " in printed
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_weights_that_do_not_fit_cannot_be_allowed(server, script, run_to_resume, tmp_path):
    """Neither is the flag advised then, nor does it lead to pages of size mismatches."""
    flags, _ = run_to_resume
    named = flags.index("--model_config_name_or_path") + 1
    config = json.loads(Path(flags[named], "config.json").read_text())
    wider = {"block_out_channels": [8, 24]} if "block_out_channels" in config else {"model_channels": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | wider))
    flags = [*flags[:named], tmp_path, *flags[named + 1 :], "--resume_from_checkpoint", "checkpoint-4"]
    (name,) = wider
    for allowed in ([], ["--allow_option_change", f"network.{name}"]):
        said = server.run([script, *flags, *allowed], ends=2)
        assert f"network.{name}: {config[name]} in the checkpoint, {wider[name]} now" in said
        assert "the weights do not fit (" in said and "another --output_dir" in said
        assert "--allow_option_change" not in said and "Traceback" not in said


def test_averages_of_another_kind_cannot_be_allowed():
    saved = {"use_ema": True, "ema_type": "exponential", "dropout": None}
    with pytest.raises(UserError, match="ema_type cannot change within a run"):
        check_options(saved, saved | {"ema_type": "power"}, allowed=["ema_type"])
    check_options(saved | {"use_ema": False}, saved | {"ema_type": "power"}, allowed=["ema_type", "use_ema"])


@pytest.mark.slow
def test_harmless_options_pass_and_others_when_allowed(server, script, run_to_resume):
    flags, folder = run_to_resume
    weights = {name: (folder / "checkpoint-8" / name).read_bytes() for name in BYTES}
    resume = [*flags, "--resume_from_checkpoint", "checkpoint-4"]
    harmless = ["--logging_steps", 3, "--checkpointing_steps", 2, "--dataloader_num_workers", 2, "--cache_images", "no"]
    harmless += ["--eval_batch_size", 2, "--save_images_steps", 3, "--checkpoints_total_limit", 5]
    server.run([script, *resume, *harmless, "--train_batch_size", 4, "--gradient_accumulation_steps", 2])
    server.run([script, *resume, *harmless])
    assert all(same_bytes(folder / "checkpoint-8" / name, content) for name, content in weights.items())
    server.run([script, *resume, "--learning_rate", 2e-3, "--allow_option_change", "learning_rate"])
    assert not same_bytes(folder / "checkpoint-8" / BYTES[0], weights[BYTES[0]])


NEW = {  # options that are allowed to change: what the optimizer has after it
    "adam_beta1": (["--adam_beta1", 0.5], ("betas", (0.5, 0.999))),
    "adam_beta2": (["--adam_beta2", 0.9], ("betas", (0.95, 0.9))),
    "adam_epsilon": (["--adam_epsilon", 1e-3], ("eps", 1e-3)),
    "adam_weight_decay": (["--adam_weight_decay", 0.3], ("weight_decay", 0.3)),
    "optimizer": (["--optimizer", "adam"], ("decoupled_weight_decay", False)),
    "optimizer momentum": (["--optimizer", "sgd", "--momentum", 0.5], ("momentum", 0.5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [*list(NEW)[-2:], *slow_turns(*list(NEW)[:-2])])
def test_an_optimizer_takes_an_allowed_change_from_the_resume_on(train_script, script, script_flags, tmp_path, names, capsys):
    flags, (given, (setting, value)) = [*script_flags, "--output_dir", tmp_path, "--checkpointing_steps", 4], NEW[names]
    flags += ["--lr_scheduler", "constant", "--adam_beta1", 0.95, "--adam_beta2", 0.999]
    assert train_script([*flags, "--max_train_steps", 4]) == 0
    resumed = [*flags, "--resume_from_checkpoint", "latest", *given, "--allow_option_change", *names.split()]
    assert train_script([*resumed, "--max_train_steps", 8]) == 0
    stored = torch.load(tmp_path / "checkpoint-8/optimizer.bin", weights_only=True)["param_groups"]
    if setting == "eps" and script == "train_edm2.py":
        value /= 16 * 16
    assert stored[0][setting] == pytest.approx(value) and stored[0]["params"]
    if setting == "weight_decay":
        assert stored[1][setting] == 0
    assert step_seen(tmp_path)[1] == {}
    last = [*flags, "--resume_from_checkpoint", "latest", *given, "--max_train_steps", 9]
    assert train_script(last) == 0  # the checkpoint has it by now: nothing changes any more
    assert "other bits" not in capsys.readouterr().out  # though one of them may keep a tensor more for each parameter


def largest_difference(first: Path, second: Path) -> float:
    first, second = load_file(first), load_file(second)
    return max(((first[k] - second[k]).norm() / first[k].norm().clamp(min=1e-6)).item() for k in first)


@pytest.mark.slow
def test_2_then_1_then_4_processes_train_as_1(server, script, script_flags, tmp_path):
    """Each life ends by a signal; almost five passes over 40 images, of which each shows every image once."""
    flags = [*script_flags, "--max_train_steps", STEPS, "--max_train_images", IMAGES, "--checkpointing_steps", STEPS]
    traces = tmp_path / "whole-trace", tmp_path / "elastic-trace"
    whole, elastic = tmp_path / "whole", tmp_path / "elastic"
    server.run([INJECT, script, "none", "--record", traces[0], "--", *flags, "--output_dir", whole])
    resume = ["--output_dir", elastic, "--resume_from_checkpoint", "latest"]
    lives, updates = [], []
    for processes, stop_after in ((2, 7), (1, 8), (4, None)):
        fault = ["signal", "--value", "SIGTERM", "--step", stop_after] if stop_after else ["none"]
        split = ["--train_batch_size", BATCH // processes]
        command = [INJECT, script, *fault, "--record", traces[1], "--", *flags, *resume, *split]
        runs = server.start(command, processes)
        assert [run.wait() for run in runs] == [75 if stop_after else 0] * processes, runs[0].text()
        updates += images_of_updates(traces[1])
        traces[1].unlink()
        assert len(updates) == newest(elastic)  # no update was done twice and none left out
        lives.append(newest(elastic))
    assert lives[0] < lives[1] < lives[2] == STEPS
    assert [sorted(u) for u in updates] == [sorted(u) for u in images_of_updates(traces[0])]
    images = [image for update in updates for image in sorted(update)]
    for start in range(0, len(images) - IMAGES, IMAGES):
        assert sorted(images[start : start + IMAGES]) == list(range(IMAGES))
    for tag, tolerance in {"train/loss": 1e-5, "train/grad_norm": 1e-4, "train/lr": 0, "train/samples_seen": 0}.items():
        expected, actual = (logged_scalars(folder, tag) for folder in (whole, elastic))
        assert actual == pytest.approx(expected, rel=tolerance), tag
    last = f"checkpoint-{STEPS}"
    differences = [largest_difference(whole / last / file, elastic / last / file) for file in BYTES[:2]]
    print("largest relative differences of weights and EMA:", differences)
    assert max(differences) < WEIGHTS_TOLERANCE
    assert not same(whole / last / BYTES[0], elastic / last / BYTES[0])  # it was another summation order


@pytest.mark.slow
def test_three_processes_resume_bit_for_bit(server, script, script_flags, tmp_path):
    """The sum of three gradients depends on the order, and that on where they lie among what DDP sends at once."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = [*script_flags, "--train_batch_size", 4, "--max_train_steps", 6, "--checkpointing_steps", 3]
    server.run([script, *flags, "--output_dir", whole], 3)
    shutil.copytree(whole / "checkpoint-3", resumed / "checkpoint-3")
    server.run([script, *flags, "--output_dir", resumed, "--resume_from_checkpoint", "latest"], 3)
    for name in BYTES:
        assert same(resumed / "checkpoint-6" / name, whole / "checkpoint-6" / name), name


def images_of_updates(trace: Path) -> list[list[int]]:
    """The images of each update, over all ranks."""
    ranks = {}
    for line in trace.read_text().splitlines():
        rank, *images = map(int, line.split())
        ranks.setdefault(rank, []).append(images)
    return [[image for part in parts for image in part] for parts in zip(*ranks.values(), strict=True)]


def test_a_global_batch_that_does_not_divide_is_refused(server, script, run_to_resume):
    flags, folder = run_to_resume
    command = [script, *flags, "--resume_from_checkpoint", "latest", "--train_batch_size", 3]
    said = server.run(command, 3, ends=2)  # by whichever rank is first, and by no other
    assert said.count("global_batch_size: 8 in the checkpoint, 9 now") == 1
    assert "\nadd --global_batch_size 8, and leave out --train_batch_size" in said
    assert [path.name for path in list_checkpoints(folder)][-1] == "checkpoint-8"


def test_an_option_that_does_not_exist_cannot_be_allowed(server, script, run_to_resume):
    flags, _ = run_to_resume
    wrong = ["--resume_from_checkpoint", "latest", "--train_batch_size", 4, "--allow_option_change", "global_batchsize"]
    said = server.run([script, *flags, *wrong], ends=2)
    assert "global_batchsize: no option has this name\nnearest: global_batch_size" in said
