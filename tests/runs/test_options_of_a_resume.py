"""Which options may differ when a run is resumed."""

import pytest

from utils.core.errors import UserError
from utils.runs.folder import check_options

SAVED = {
    "train_data_dir": "photos/",
    "dataset_split": "train",
    "data_fingerprint": "abc",
    "model_preset": None,
    "network.layers_per_block": 2,
    "seed": 0,
}


def test_the_same_data_and_network_by_other_names_are_the_same_run():
    assert check_options(SAVED, dict(SAVED), []) == []
    now = SAVED | {"train_data_dir": "/tmp/node3/photos.zip", "dataset_split": "train[:100]", "model_preset": "small"}
    notes = check_options(SAVED, now, [])
    assert "train_data_dir was photos/ and is now /tmp/node3/photos.zip: the content is the same" in notes and len(notes) == 3


def test_other_data_or_another_network_is_refused_with_its_name():
    now = SAVED | {"train_data_dir": "others", "data_fingerprint": "def", "model_preset": "small"}
    with pytest.raises(UserError, match=r"(?s)data_fingerprint: abc .* train_data_dir: photos/ in the checkpoint, others now"):
        check_options(SAVED, now, [])
    with pytest.raises(UserError, match="model_preset") as caught:
        check_options(SAVED, SAVED | {"network.layers_per_block": 3, "model_preset": "small", "dataset_split": "all"}, [])
    assert "dataset_split" not in str(caught.value)


def test_what_an_older_checkpoint_does_not_know_is_compared_by_its_name():
    saved = {name: value for name, value in SAVED.items() if name != "data_fingerprint"}
    with pytest.raises(UserError, match="train_data_dir: photos/ in the checkpoint, elsewhere now"):
        check_options(saved, saved | {"train_data_dir": "elsewhere"}, [])
    with pytest.raises(UserError, match="seed: 0 in the checkpoint, 1 now"):
        check_options(SAVED, SAVED | {"seed": 1}, [])
    allowed = check_options(SAVED, SAVED | {"seed": 1}, ["seed"])
    assert allowed == ["seed was 0 and is now 1: --allow_option_change allows it"]


def test_a_name_that_no_option_has_cannot_be_allowed():
    with pytest.raises(UserError, match=r"--allow_option_change sed: no option has this name\nnearest: seed"):
        check_options(SAVED, SAVED, ["sed"])
    assert check_options(SAVED, SAVED, ["seed"]) == []


def test_a_flag_that_an_earlier_version_did_not_have_was_at_its_default():
    assert check_options(SAVED, SAVED | {"data_range": None, "class_conditional": False, "label_dropout": 0.1}, []) == []
    assert check_options(SAVED, SAVED | {"objective": "ddpm", "P_mean": None, "P_std": 1.0}, []) == []
    with pytest.raises(UserError, match="objective: ddpm in the checkpoint, flow now"):
        check_options(SAVED, SAVED | {"objective": "flow", "P_mean": None, "P_std": 1.0}, [])
    with pytest.raises(UserError, match=r"data_range: None in the checkpoint, \[-1, 1\] now"):
        check_options(SAVED, SAVED | {"data_range": [-1, 1]}, [])


def test_a_flag_that_is_newer_than_the_checkpoint_and_not_set_is_no_change():
    assert check_options({"seed": 0}, {"seed": 0, "newer": None}, []) == []
    with pytest.raises(UserError, match=r"newer: \(absent\) in the checkpoint, 1 now"):
        check_options({"seed": 0}, {"seed": 0, "newer": 1}, [])


def test_the_pipeline_that_a_run_started_from_may_be_elsewhere():
    saved = SAVED | {"pretrained": "p", "pretrained.scheduler": {"beta_schedule": "linear"}}
    [note] = check_options(saved, saved | {"pretrained": "moved/p"}, [])
    assert note == "pretrained was p and is now moved/p: the weights are the checkpoint's"
    with pytest.raises(UserError, match=r"pretrained: p in the checkpoint, None now"):
        check_options(saved, saved | {"pretrained": None}, [])
