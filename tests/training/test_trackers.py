"""Trackers are started by their names, told what the run is, and given up where they fail."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from conftest import logged_scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from utils.core.errors import UserError
from utils.options.flags import DDPMOptions
from utils.runs.folder import TRACKED
from utils.training.trackers import Trackers, start_trackers


class Server:
    """A tracker that notes what it is given."""

    name, requires_logging_directory = "wandb", False

    def __init__(self, project, **about):
        self.project, self.about, self.logged = project, about, []

    def start(self):
        if self.project == "refused":
            raise PermissionError("api_key not configured\n(no-tty)")
        if self.about.get("id") == "gone":
            raise LookupError("no run has this id")
        self.run = SimpleNamespace(id=self.about.get("id", "new"))

    def store_init_configuration(self, values):
        self.values = values

    def log(self, values, step):
        self.logged.append((step, values))


@pytest.fixture
def server(monkeypatch):
    for variable in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Server)
    return SimpleNamespace(is_main_process=True, trackers=[])


def options(**given) -> DDPMOptions:
    return DDPMOptions(**{"output_dir": "/nowhere/cats", "logger": "wandb", **given})


@pytest.mark.parametrize(
    ("given", "variables", "project", "run"),
    [
        ({}, {}, "train_ddpm", "cats"),
        ({}, {"WANDB_PROJECT": "mine", "WANDB_NAME": "first"}, "mine", "first"),
        ({"project_name": "pets"}, {"WANDB_PROJECT": "mine"}, "pets", "cats"),
    ],
)
def test_names_of_project_and_run(server, monkeypatch, given, variables, project, run):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    start_trackers(server, options(**given))
    [tracker] = server.trackers
    assert (tracker.project, tracker.about) == (project, {"name": run})
    trackers = Trackers(server, options(**given), first_step=0, print_line=print)
    trackers.describe({"learning_rate": 0.1, "ema_widths": [0.1, 0.2], "seed": 3, "use_ema": True, "lr_decay_steps": None})
    trackers.log({"train/loss": 1.0, "perf/data_wait": 0.5}, step=7)
    assert tracker.values == {"learning_rate": 0.1, "ema_widths": "[0.1, 0.2]", "seed": 3, "use_ema": True}
    assert tracker.logged == [(7, {"train/loss": 1.0, "perf/data_wait": 0.5})]


@pytest.mark.parametrize(
    ("resumed", "recorded", "variable", "about"),
    [
        ("latest", '{"wandb": "a1"}', None, {"id": "a1", "resume": "allow"}),
        ("latest", '{"wandb": "a1"}', "mine", {}),  # which wandb reads itself
        ("latest", '{"wandb": "gone"}', None, {}),  # deleted, or on another server
        ("latest", "{", None, {}),
        ("latest", '{"wandb": 1}', None, {}),
        ("latest", '{"wandb": "a1", "output_dir": "/elsewhere"}', None, {}),  # this folder is a copy
        ("checkpoint-5", '{"wandb": "a1"}', None, {"id": "a1", "resume": "allow"}),
        ("checkpoint-3", '{"wandb": "a1"}', None, {}),
        (None, '{"wandb": "a1"}', None, {}),
    ],
    ids=[
        *("resumed", "by the user's variable", "gone", "damaged", "a number"),
        *("a copy", "by name", "an older checkpoint", "a new run"),
    ],
)
def test_a_resumed_run_goes_on_in_its_run_of_the_tracker(
    server, monkeypatch, tmp_path, capsys, resumed, recorded, variable, about
):
    monkeypatch.setattr("utils.runs.checkpoint_files.verify_checkpoint", lambda path, **_: None)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_RUN_ID", variable)
    for step in (3, 5):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / TRACKED).write_text(recorded)
    of_the_run = options(output_dir=str(tmp_path), resume_from_checkpoint=resumed)
    start_trackers(server, of_the_run)
    [tracker] = server.trackers
    assert tracker.about == {"name": tmp_path.name, **about}
    said = {"gone": "no run has this id", "elsewhere": "trackers.json is of /elsewhere", "-3": "checkpoint-5 is newer"}
    expected = [words for known, words in said.items() if known in f"{recorded} {resumed}"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(expected)
    assert all(words in line and line.endswith("; a new run starts there") for words, line in zip(expected, lines))
    Trackers(server, of_the_run, first_step=5, print_line=print)
    assert json.loads((tmp_path / TRACKED).read_text()) == {"wandb": about.get("id", "new"), "output_dir": str(tmp_path)}


def test_mlflow_gets_what_is_new_or_changed(monkeypatch, tmp_path):
    class MLflow(Server):
        name = "mlflow"

        def start(self):
            run = SimpleNamespace(info=SimpleNamespace(run_id=self.about.get("run_id", "m1")))
            run.data = SimpleNamespace(params={"seed": "0", "learning_rate": "0.1", "use_ema": "True"})
            self.active_run = run

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", MLflow)
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / TRACKED).write_text('{"mlflow": "m1"}')
    accelerator = SimpleNamespace(is_main_process=True, trackers=[])
    resumed = options(output_dir=str(tmp_path), logger="mlflow", resume_from_checkpoint="latest")
    start_trackers(accelerator, resumed)
    Trackers(accelerator, resumed, 5, print).describe({"seed": 0, "learning_rate": 0.2, "use_ema": True, "dropout": 0.1})
    assert accelerator.trackers[0].values == {"learning_rate from update 5": 0.2, "dropout": 0.1}


def test_one_that_cannot_start_is_one_line(server):
    with pytest.raises(
        UserError, match=r"^--logger wandb cannot start: PermissionError: api_key not configured \(no-tty\)\ncheck its login"
    ):
        start_trackers(server, options(project_name="refused"))


@pytest.mark.parametrize(
    ("logger", "expected"),
    [("none", []), ("tensorboard", ["tensorboard"]), ("wandb, tensorboard,wandb", ["wandb", "tensorboard"]), ("", [])],
)
def test_several_trackers_or_none(logger, expected):
    assert options(logger=logger).trackers == expected


def tensorboard(folder: Path, first_step: int) -> Trackers:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, project_dir=str(folder / "logs"))
    return Trackers(accelerator, options(logger="tensorboard"), first_step, print)


def test_a_clock_that_was_set_back_between_two_starts(tmp_path, monkeypatch):
    """Twice: the second start's files then lie beside those of the future and beside those that were renamed."""
    now = time.time()
    for first_step, clock in ((0, now), (2, now - 3600), (3, now - 7200)):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        trackers = tensorboard(tmp_path, first_step)
        for step in range(first_step + 1, 6):
            trackers.log({"train/loss": first_step + step / 10}, step)
        trackers.close()
    values = logged_scalars(tmp_path, "train/loss")
    assert values == pytest.approx({1: 0.1, 2: 0.2, 3: 2.3, 4: 3.4, 5: 3.5})


def test_tensorboard_shows_training_and_validation_first_and_one_run(tmp_path):
    trackers = tensorboard(tmp_path, 0)
    trackers.describe({"learning_rate": 0.1, "dataset_name": "digits"})
    trackers.log({"train/loss": 1.0, "validation/loss": 2.0, "eval/fd_randconv": 3.0, "perf/data_wait": 0.5}, step=1)
    trackers.close()
    AcceleratorState._reset_state(reset_partial_state=True)
    [folder] = Path(tmp_path, "logs").iterdir()
    assert all(path.is_file() for path in folder.iterdir())  # a folder would be another run
    events = EventAccumulator(str(folder)).Reload()
    scalars = sorted(events.Tags()["scalars"])
    assert scalars == ["train/loss", "validation/loss", "x_eval/fd_randconv", "x_perf/data_wait"]
    summaries = {tag: events.SummaryMetadata(tag).plugin_data for tag in events.summary_metadata}
    shown = [data for data in summaries.values() if data.plugin_name == "hparams"]
    started = [plugin_data_pb2.HParamsPluginData.FromString(data.content).session_start_info.hparams for data in shown]
    [values] = [dict(values) for values in started if values]
    assert values["learning_rate"].number_value == 0.1 and values["dataset_name"].string_value == "digits"


def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on():
    said = []
    broken, working = Mock(), Mock()  # each takes what it is given
    broken.name, working.name = "broken", "working"
    broken.store_init_configuration.side_effect = ValueError("too long")
    broken.log.side_effect = OSError("no space left")
    accelerator = SimpleNamespace(is_main_process=True, trackers=[broken, working])
    trackers = Trackers(accelerator, options(logger="none"), 0, said.append)
    trackers.describe({})
    for step in (1, 2):
        trackers.log({"train/loss": 1.0}, step)
    assert [call.kwargs["step"] for call in working.log.call_args_list] == [1, 2] and broken.log.call_count == 1
    assert said == ["the settings of the run do not go to broken: too long", "nothing more goes to broken: no space left"]


@pytest.mark.slow
def test_a_run_whose_tracker_cannot_start_leaves_no_folder(train, tiny_flags, monkeypatch, tmp_path):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Server)
    monkeypatch.setattr("utils.core.distributed.check_tracker", lambda name: None)
    with pytest.raises(UserError, match="--logger wandb cannot start"):
        train([*tiny_flags, "--logger", "tensorboard,wandb", "--project_name", "refused", "--output_dir", tmp_path / "run"])
    assert not (tmp_path / "run").exists()
