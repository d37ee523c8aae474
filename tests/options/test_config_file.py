"""Flags from a file: what wins, what is refused, and that printed options mean the same when they are read again."""

import importlib
import json

import pytest
from command_lines import LINES, RECORDED

import reconstruct_ema
import train_ddpm
from utils.core.errors import UserError


def written(folder, text: str, name: str = "run.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_preset_gives_way_to_the_file_and_the_file_to_the_command_line(tmp_path):
    file = written(tmp_path, "model_preset: cifar10\ndataset_name: a/b\nlearning_rate: 1e-3\ntrain-batch-size: 64\n")
    options = train_ddpm.parse_args(["--config", file, "--train_batch_size", "32"])
    assert (options.ema_max_decay, options.lr_warmup_steps, options.learning_rate, options.train_batch_size) == (
        *(0.9999, 5000),  # the default, the preset's
        *(1e-3, 32),  # the file's, the command line's
    )
    assert options.given == {"dataset_name", "learning_rate", "train_batch_size"}  # the preset is no more than repeated
    other = train_ddpm.parse_args(["--config", file, "--model_preset", "celeba64"])
    assert (other.resolution, other.learning_rate) == (64, 1e-3)


def test_what_is_given_above_takes_away_what_contradicts_it_below(tmp_path):
    file = written(tmp_path, "dataset_name: digits\nmax_train_steps: 7\nglobal_batch_size: 64\n")
    options = train_ddpm.parse_args(
        ["--config", file, "--num_epochs", "3", "--train_data_dir", "photos", "--gradient_accumulation_steps", "2"]
    )
    assert (options.max_train_steps, options.num_epochs, options.global_batch_size) == (None, 3, None)
    assert (options.dataset_name, options.train_data_dir, options.model_preset) == (None, "photos", None)


def test_text_of_yaml_is_read_as_on_a_command_line(tmp_path):
    file = written(
        tmp_path,
        "mixed_precision: no\nlearning_rate: 1e-4\nmodel_preset: 256\ndataset_name: 2020\ncompile: true\n"
        "use_ema: off\nema_widths: [0.05, 1e-1]\nallow_option_change: dropout\ndropout: null\n",
    )
    options = train_ddpm.parse_args(["--config", file])
    assert (options.mixed_precision, options.learning_rate, options.model_preset) == ("no", 1e-4, "256")
    assert (options.dataset_name, options.compile, options.use_ema, options.dropout) == ("2020", True, False, None)
    assert (options.ema_widths, options.allow_option_change) == ([0.05, 0.1], ["dropout"])


@pytest.mark.parametrize("name", LINES)
def test_printed_options_mean_the_same_when_they_are_read(name, tmp_path, capsys):
    script = importlib.import_module(name)
    lines = json.loads(RECORDED.read_text())[name]["lines"]
    accepted = [line.split() for line, found in lines.items() if "options" in found]
    assert accepted
    for words in accepted[:: len(accepted) // 12 + 1]:
        options = script.parse_args(words)
        with pytest.raises(SystemExit) as end:
            script.parse_args([*words, "--print_config"])
        assert end.value.code == 0
        printed = capsys.readouterr().out
        assert "hub_token" not in printed and "secret" not in printed
        again = script.parse_args(["--config", written(tmp_path, printed)])
        expected = vars(options) | ({"hub_token": None} if "--hub_token" in words else {})
        assert vars(again) == expected
        split = {"train_batch_size", "gradient_accumulation_steps"}  # what is given of these, the memory plan keeps
        assert again.given & split <= options.given


def test_a_run_from_a_file_is_recorded_and_resumes_by_its_values(train, tiny_flags, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("dropout: 0.1\nadam-beta2: 0.99\noverwrite_output_dir: true\nhub_token: secret\n")
    run = [*tiny_flags, "--output_dir", tmp_path / "run", "--max_train_steps", "2", "--checkpointing_steps", "2"]
    assert train([*run, "--config", file]) == 0
    # what shapes the run is in its record, and nothing that belongs to that start
    record = tmp_path / "run" / "options.json"
    recorded = json.loads(record.read_text())["options"]
    again = json.loads(json.dumps(vars(train_ddpm.parse_args(["--config", str(record)]))))
    assert (recorded.pop("overwrite_output_dir"), recorded.pop("hub_token")) == (True, "<hidden>")
    assert (again.pop("overwrite_output_dir"), again.pop("hub_token")) == (False, None)
    assert again == recorded and (again["dropout"], again["adam_beta2"]) == (0.1, 0.99)
    # a resume compares the values of its own file with those
    file.write_text("dropout: 0.2\nadam_beta2: 0.99\n")
    resumed = [*run, "--resume_from_checkpoint", "latest"]
    with pytest.raises(UserError, match=r"  dropout: 0.1 in the checkpoint, 0.2 now\n(  network.*\n)?use the"):
        train([*resumed, "--config", file])


def test_a_flag_that_is_gone_may_stand_in_a_record_unused(tmp_path):
    content = {"options": {"dataset_name": "d", "profile": None}}
    assert train_ddpm.parse_args(["--config", written(tmp_path, json.dumps(content), "options.json")]).dataset_name == "d"
    content["options"]["profile"] = 20
    with pytest.raises(UserError, match="profile is no longer a flag\nuse a profiler"):
        train_ddpm.parse_args(["--config", written(tmp_path, json.dumps(content), "options.json")])


def test_a_record_on_another_number_of_processes_keeps_the_update(tmp_path):
    content = {"options": {"dataset_name": "d", "global_batch_size": 64, "train_batch_size": 16, "streaming": False}}
    content["options"]["gradient_accumulation_steps"] = 4  # on one process
    options = train_ddpm.parse_args(["--config", written(tmp_path, json.dumps(content), "options.json")])
    assert (options.global_batch_size, options.train_batch_size, options.gradient_accumulation_steps) == (64, 16, 1)
    assert "gradient_accumulation_steps" not in options.given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read --config .*: No such file"),
        ("- a\n- b\n", "is not a list of flags"),
        ("just words", "is not a list of flags"),
        ("resolution: [1\n", "neither YAML nor JSON"),
        ("resolution: big\n", "--config .*: resolution must be a number of pixels up to 16384, or two .*; got big"),
        ("resolution: null\n", "resolution must be a number of pixels up to 16384, or two .*; got null"),
        ("resolution: [1, 2]\n", "resolution must be a number of pixels up to 16384, or two .*; got a list"),
        ("compile: maybe\n", "compile must be true or false; got maybe"),
        ("lr_scheduler: none\n", "lr_scheduler must be one of constant, .*; got none"),
        ("dropout: {a: 1}\n", "dropout must be a number of at least 0 and below 1; got a mapping"),
        ("learning_rat: 1\n", "unknown flag learning_rat\nnearest: learning_rate\n.* --help all lists all flags"),
        ("config: other.yaml\n", "unknown flag config"),
        ('{"learning_rat": 1}', "unknown flag learning_rat"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(text, message, tmp_path):
    file = tmp_path / "missing.yaml" if text is None else written(tmp_path, text)
    with pytest.raises(UserError, match=message):
        train_ddpm.parse_args(["--dataset_name", "d", "--config", str(file)])


def test_an_empty_file_gives_nothing(tmp_path):
    assert train_ddpm.parse_args(["--config", written(tmp_path, "# nothing yet\n")]) == train_ddpm.parse_args([])


def test_what_a_script_needs_may_stand_in_the_file(tmp_path):
    file = written(tmp_path, "run: runs/a\nwidth: 0.1\noutput_dir: out\n")
    options = reconstruct_ema.parse_args(["--config", file])
    assert (str(options.run), options.width, str(options.output_dir)) == ("runs/a", 0.1, "out")


def test_what_the_pipeline_of_the_command_line_decides_is_not_taken_from_a_file(tmp_path):
    record = {"pretrained": "a", "vae": "a", "image_channels": 1, "prediction_type": "sample", "resolution": 32, "seed": 7}
    file = written(tmp_path, json.dumps({"options": record | {"dataset_name": "d"}}), "options.json")
    options = train_ddpm.parse_args(["--config", file, "--pretrained", "b"])
    assert (options.pretrained, options.vae, options.resolution, options.seed) == ("b", None, 32, 7)
    assert options.given == {"pretrained", "dataset_name", "resolution", "seed"}
    assert train_ddpm.parse_args(["--config", file]).vae == "a"
    assert train_ddpm.parse_args(["--config", file, "--pretrained", "b", "--vae", "c"]).vae == "c"
    options = train_ddpm.parse_args(
        ["--config", written(tmp_path, "model_preset: celeba64\ndataset_name: d\n"), "--pretrained", "b"]
    )
    assert options.model_preset is None
