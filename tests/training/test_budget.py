"""One dial sets a run: what it refuses, what it keeps of the user's, and that its choice is stored and repeated bit for bit."""

import json
import shlex
import shutil

import pytest
from conftest import same_bytes

import train_ddpm
import train_edm2
from utils.core.errors import UserError
from utils.core.size import read_budget
from utils.options.budget import OF_THE_DATA, SETS, chosen_by, repeating
from utils.options.presets import EDM2_FLAGS, FLAGS, networks_by_size
from utils.training import budget

CHOSEN = {"max_train_steps": 77, "learning_rate": 0.003, "lr_warmup_steps": 3}


def flags_of(line: str) -> list[str]:
    return shlex.split(line[line.index("--") :])


def test_amounts_are_times_or_updates():
    assert read_budget("90s") == (90.0, "seconds") and read_budget("1.5 h") == (5400.0, "seconds")
    assert read_budget("20min") == (1200.0, "seconds") and read_budget("3000updates") == (3000.0, "updates")
    for text in ("0", "0s", "-1min", "2 bananas", "h", "1e9h", "0.5updates", "nan s"):
        with pytest.raises(ValueError, match="neither a time nor"):
            read_budget(text)
    for line, said in (
        ("--budget -1min", "such as 90s, 20min or 2h, or"),
        ("--budget 2h --num_epochs 3", "--num_epochs do not go"),
    ):
        with pytest.raises(UserError, match=said) as refused:
            train_ddpm.parse_args(line.split())
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "line",
    [
        "--budget 2min",
        "--budget 2h --train_data_dir photos --resolution 64 --learning_rate 0.1 --save_images_epochs 2 --hub_token t",
        "--budget 9updates --dataset_name a/b --gradient_accumulation_steps 2 --random_flip --overwrite_output_dir",
    ],
)
@pytest.mark.parametrize(("script", "preset"), [(train_ddpm, "digits16"), (train_ddpm, "cifar10"), (train_edm2, "XS")])
def test_the_line_without_the_dial_gives_the_same_options(script, preset, line):
    """What the user set stays; no preset turns on what the user's line leaves off."""
    options = script.parse_args(line.split())
    data = {name: getattr(options, name) for name in OF_THE_DATA}
    made = chosen_by(options, CHOSEN | data | {"model_preset": preset})
    assert made.learning_rate == (0.1 if "--learning_rate" in line else 0.003) and made.max_train_steps == 77
    assert made.random_flip == ("--random_flip" in line)
    repeated = repeating(made)
    again = script.parse_args(flags_of(repeated))
    once = {"budget": None, "overwrite_output_dir": False, "hub_token": None}
    assert vars(again) == vars(made) | once and "budget" not in repeated and "hub_token" not in repeated


def test_networks_come_by_their_size():
    assert networks_by_size(FLAGS, 64, few=False, on_cpu=True) == ["digits16", "small64"]
    assert networks_by_size(FLAGS, 64, few=False, on_cpu=False) == ["digits16", "small64", "cifar10", "celeba64", "256"]
    assert networks_by_size(FLAGS, 28, few=False, on_cpu=False) == ["digits16"]
    assert networks_by_size(EDM2_FLAGS, 32, few=True, on_cpu=False) == ["few"]
    assert networks_by_size(EDM2_FLAGS, 32, few=False, on_cpu=False)[:4] == ["digits16", "small32", "XXS", "XS"]


@pytest.fixture
def eight(monkeypatch):
    """Eight updates fit, as measured."""
    monkeypatch.setattr(budget._Trial, "left", lambda self: 8.5 * self.seconds)


def without_length(flags: list, *more) -> list:
    place = flags.index("--max_train_steps")
    return [*flags[:place], *flags[place + 2 :], *more]


def test_the_choice_is_stored_resumed_and_repeated_bit_for_bit(
    train_script, script, script_flags, tmp_path, eight, monkeypatch, capsys
):
    flags = without_length(script_flags, "--checkpointing_steps", 4, "--budget", "10s")
    assert train_script([*flags, "--output_dir", tmp_path / "whole"]) == 0
    said = capsys.readouterr().out
    assert (
        "--budget 10s: the network, 8 updates of 8 images" in said and "--learning_rate 0.001" in said.split("as you set it")[1]
    )
    record = json.loads((tmp_path / "whole/options.json").read_text())
    line = record["command_without_budget"]
    assert line in said and record["resolved"]["max_train_steps"] == 8

    monkeypatch.setattr(budget._Dial, "choose", lambda self: pytest.fail("measured anew"))
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for name in ("checkpoint-8", "exit_status"):
        path = tmp_path / "killed" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    resume = [*flags, "--output_dir", tmp_path / "killed", "--resume_from_checkpoint", "latest"]
    assert train_script(resume) == 0
    assert train_script([*flags_of(line), "--output_dir", tmp_path / "repeated"]) == 0
    for name in ("model.safetensors", "ema.safetensors", "optimizer.bin", "state.json"):
        whole = tmp_path / "whole/checkpoint-8" / name
        for other in ("killed", "repeated"):
            assert not whole.exists() or same_bytes(tmp_path / other / "checkpoint-8" / name, whole), (other, name)
    resume[resume.index("10s")] = "20s"
    with pytest.raises(UserError, match="has --budget 10s, and not 20s"):
        train_script(resume)


def test_a_budget_of_updates_measures_nothing_and_few_images_get_their_preset(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(budget._Trial, "measure", lambda self: pytest.fail("measured"))
    flags = (
        "--dataset_name digits --resolution 16 --image_channels 1 --max_train_images 40 --budget 3updates --eval_batch_size 4"
    )
    flags += " --ddpm_num_inference_steps 2 --eval_images 10 --logging_steps 1"
    assert train([*flags.split(), "--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "run"]) == 0
    record = json.loads((tmp_path / "run/options.json").read_text())
    assert record["options"]["model_preset"] == "few" and record["options"]["dropout"] == 0.1
    assert record["resolved"]["validation_images"] == 8 and record["resolved"]["max_train_steps"] == 3
    said = capsys.readouterr().out
    assert "32 images are few: 0.7 M parameters, dropout 0.1, 3 updates show each one 1 times" in said


def test_a_time_without_room_for_an_update_is_refused(train, tiny_flags, tmp_path, monkeypatch):
    monkeypatch.setattr(budget._Trial, "left", lambda self: -5.0)
    with pytest.raises(UserError, match="--budget 5s is too short: start, samples and export take 0:10"):
        train(without_length(tiny_flags, "--budget", "5s", "--output_dir", tmp_path))


@pytest.mark.slow
def test_two_processes_take_the_choice_of_the_first(server, script, script_flags, tmp_path):
    flags = without_length(script_flags, "--budget", "12updates", "--train_batch_size", 4, "--output_dir", tmp_path)
    said = server.run([script, *flags], 2)
    assert said.count("--budget 12updates:") == 1
    record = json.loads((tmp_path / "options.json").read_text())
    assert record["resolved"]["num_processes"] == 2 and set(SETS) <= record["options"].keys()
