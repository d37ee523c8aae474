"""What goes wrong on the Hub is told with what to do; nothing that a library says is cut off."""

import json
import os
import re
import subprocess
import sys
import types
from itertools import pairwise

import datasets
import huggingface_hub
import pytest
from conftest import ROOT
from hub_stand_in import hub_stand_in

from utils.core.errors import UserError, in_full
from utils.core.hub import log_in, no_such_path, reason_of
from utils.data.sources import find_builder
from utils.options.flags import DDPMOptions

LOAD = """
import json, sys
from utils.core.errors import UserError
from utils.options.flags import DDPMOptions

def load(name, options):
    if name == "network":
        from diffusers import UNet2DModel
        from utils.diffusion.unet import read_config
        read_config(UNet2DModel, DDPMOptions(model_config_name_or_path="some/thing"), 3)
    elif name == "pipeline":
        from utils.diffusion.pipelines import load_unconditional
        load_unconditional("some/thing")
    else:
        from utils.data.sources import open_dataset
        open_dataset(DDPMOptions(dataset_name=name, **options))

told = []
for name, options in json.loads(sys.argv[1]):
    try:
        load(name, options)
    except UserError as error:
        told.append(str(error))
print(json.dumps(told))
"""


def check_told(asked: dict[tuple[str, str], str], tmp_path, address: str = "http://127.0.0.1:9") -> None:
    """Loads in another process each (name, options of a dataset as JSON), which must be refused with the words beside it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
    command = [sys.executable, "-c", LOAD, json.dumps([[name, json.loads(options)] for name, options in asked])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert len(told) == len(asked) and all(message.count("\n") <= 1 for message in told)
    assert all(words in message for words, message in zip(asked.values(), told)), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("private", "cannot be accessed.\ncheck the name or path, and the network, or log in with `hf auth login`"),
        ("gated", "it is gated\nask for access at https://huggingface.co/datasets/some/thing, then log in"),
        (None, "Please pick one among the available configs: ['small', 'large']"),
    ],
)
def test_a_dataset_that_cannot_be_had(fault, message, tmp_path):
    (tmp_path / "repository").mkdir()
    for name in ("a", "b"):
        datasets.Dataset.from_dict({"text": ["x"]}).to_parquet(tmp_path / "repository" / f"{name}.parquet")
    configs = "configs:\n- {config_name: small, data_files: a.parquet}\n- {config_name: large, data_files: b.parquet}\n"
    (tmp_path / "repository" / "README.md").write_text(f"---\n{configs}---\n")
    with hub_stand_in("some/thing", tmp_path / "repository", fault=fault) as (address, _):
        check_told({("some/thing", "{}"): message}, tmp_path, address)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "message"), [("private", "log in with `hf auth login`"), ("gated", "it is gated\nask for")])
def test_a_model_that_cannot_be_had(fault, message, tmp_path):
    (tmp_path / "model").mkdir()
    for file in ("config.json", "model_index.json"):
        (tmp_path / "model" / file).write_text("{}")
    with hub_stand_in("some/thing", tmp_path / "model", "models", fault=fault) as (address, _):
        check_told(dict.fromkeys((("pipeline", "{}"), ("network", "{}")), message), tmp_path, address)


@pytest.mark.slow
def test_a_connection_that_is_refused_is_told_whatever_the_library_says_first(tmp_path):
    asked = {("some/thing", "{}"): "Couldn't reach 'some/thing' on the Hub", ("network", "{}"): "Connection refused"}
    check_told(asked, tmp_path)


def failure(*texts: str) -> Exception:
    """An error with a chain of causes, the outermost first."""
    made = None
    for text in reversed(texts):
        made, cause = ValueError(text), made
        made.__cause__ = cause
    return made


def test_the_last_cause_is_told_once():
    assert in_full(failure("it failed\nsomehow", "because of this", "disk on fire")) == (
        "it failed somehow (ValueError: disk on fire)"
    )
    assert in_full(failure("it failed: disk on fire", "disk on fire")) == "it failed: disk on fire"
    assert len(in_full(failure("word " * 1000))) <= 400
    assert in_full(KeyError()) == "KeyError"
    hidden = ValueError("it failed")
    hidden.__context__ = OSError("on the way")
    assert in_full(hidden) == "it failed (OSError: on the way)"
    hidden.__cause__ = None  # as `raise ... from None` leaves it
    assert in_full(hidden) == "it failed"


class Answered(OSError):
    """The Hub's own answer, as huggingface_hub raises it."""

    def __init__(self, status: int):
        super().__init__(f"error {status}")
        self.response = types.SimpleNamespace(status_code=status)


PAGE = "https://huggingface.co/datasets/some/thing"


@pytest.mark.parametrize(
    ("causes", "message"),
    [
        ([Answered(401), OSError("check your connection")], "the Hub does not accept the token\nset another HF_TOKEN"),
        ([Answered(503), OSError("it failed")], "it failed (Answered: error 503)\ncheck the name or path, and the network"),
        ([ValueError("it is a gated dataset")], f"at {PAGE}, or set another HF_TOKEN"),  # whoever has a token needs access
    ],
)
def test_the_cause_is_told_wherever_it_stands_in_the_chain(causes, message, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for cause, error in pairwise(causes):
        error.__cause__ = cause
    assert message in reason_of(causes[-1], "some/thing", "dataset")


def test_the_advice_to_log_in_is_for_the_token_that_is_used(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for token, advice in (
        (None, "log in with `hf auth login`, or set HF_TOKEN"),
        ("hf_x", "log in again with `hf auth login --force`"),
    ):
        monkeypatch.setattr(huggingface_hub, "get_token", lambda token=token: token)
        assert log_in() == advice
    for variable in ("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(variable, "hf_y")
        assert log_in() == f"set another {variable}"


@pytest.mark.parametrize("name", ["/no/where", "./runs", "../data", "runs/a/b", "~/photos"])
def test_what_can_only_be_a_path_is_no_matter_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reason_of(ConnectionError("no route"), name, "model") == "no such file or folder\ncheck the path"


def test_a_folder_that_a_library_took_for_a_name_on_the_hub_is_said_to_be_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    for name in ("runs/digits", "./runs"):
        told_of = reason_of(ConnectionError("no route"), name, "model")
        assert told_of == "it is here, but cannot be loaded as a model (no route)\ncheck its files, and the flags about it"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("https://huggingface.co/datasets/me/shapes", "use --dataset_name me/shapes"),
        ("https://huggingface.co/datasets/mnist?row=3", "use --dataset_name mnist"),
        ("https://huggingface.co/me/network/tree/main", "use --dataset_name me/network"),
        ("https://example.com/shapes.zip", "download what is there, and give its path"),
        ("/data/huggingface.co/datasets/me/shapes", "check the path"),
    ],
)
def test_the_address_of_a_page_of_the_hub_is_answered_with_its_name(name, advice):
    with pytest.raises(UserError, match=f"--dataset_name {re.escape(name)}: [a-z ]+\n{advice}$"):
        find_builder(DDPMOptions(dataset_name=name))
    assert no_such_path(name).endswith(advice.replace("--dataset_name", "the name"))
