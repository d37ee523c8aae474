"""What goes wrong on the Hub is told with what to do; nothing that a library says is cut off."""

import json
import os
import re
import subprocess
import sys
import types
from itertools import pairwise

import huggingface_hub
import pytest
from conftest import ROOT
from datasets.exceptions import DatasetNotFoundError
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


@pytest.fixture
def repository(tmp_path):
    """Of two configs."""
    import datasets

    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("a", "b"):
        datasets.Dataset.from_dict({"text": ["x"]}).to_parquet(folder / f"{name}.parquet")
    configs = "configs:\n- {config_name: small, data_files: a.parquet}\n- {config_name: large, data_files: b.parquet}\n"
    (folder / "README.md").write_text(f"---\n{configs}---\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "asked"),
    [
        ("private", {"{}": "it doesn't exist on the Hub, or it is private\ncheck the name, or log in with `hf auth login`"}),
        ("gated", {"{}": "it is gated\nask for access at https://huggingface.co/datasets/some/thing, then log in"}),
        (
            None,
            {
                "{}": "it has several configs\nset --dataset_config_name to one of small, large",
                '{"dataset_config_name": "tiny"}': "no config 'tiny'\nset --dataset_config_name to one of small, large",
                '{"dataset_config_name": "small", "dataset_split": "dev"}': "no split dev\nset --dataset_split to one of train",
            },
        ),
        ("broken", {"{}": "some/thing: the Hub answered 500\ntry again later"}),
    ],
)
def test_a_dataset_that_cannot_be_had(fault, asked, repository, tmp_path):
    with hub_stand_in("some/thing", repository, fault=fault) as (address, _):
        check_told({("some/thing", options): words for options, words in asked.items()}, tmp_path, address)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "message"), [("private", "or it is private\ncheck"), ("gated", "it is gated\nask for")])
def test_a_model_that_cannot_be_had(fault, message, tmp_path):
    (tmp_path / "model").mkdir()
    for file in ("config.json", "model_index.json"):
        (tmp_path / "model" / file).write_text("{}")
    with hub_stand_in("some/thing", tmp_path / "model", "models", fault=fault) as (address, _):
        check_told(dict.fromkeys((("pipeline", "{}"), ("network", "{}")), message), tmp_path, address)


@pytest.mark.slow
def test_a_connection_that_is_refused_and_a_file_in_another_encoding(tmp_path):
    (tmp_path / "bad.csv").write_bytes(b"image,label\nx.png,\xff\xfe\n")
    asked = {("some/thing", "{}"): "the Hub could not be reached", (str(tmp_path / "bad.csv"), "{}"): "its text is not UTF-8"}
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
    assert len(in_full(failure("word " * 1000))) <= 500
    assert in_full(KeyError()) == "KeyError"


class Answered(OSError):
    """The Hub's own answer, as huggingface_hub raises it."""

    def __init__(self, status: int):
        super().__init__(f"error {status}")
        self.response = types.SimpleNamespace(status_code=status)


BROKEN = [ConnectionResetError("reset by peer"), OSError("reading failed")]
UNFOUND = [ConnectionError("please check your connection"), FileNotFoundError("Couldn't find any data file")]
PAGE = "https://huggingface.co/datasets/some/thing"


@pytest.mark.parametrize(
    ("causes", "offline", "message"),
    [
        (BROKEN, "1", "HF_HUB_OFFLINE does not allow"),
        (BROKEN, "", "the Hub could not be reached"),
        ([Answered(401), *UNFOUND], "", "the Hub does not accept the token\nset another HF_TOKEN"),
        ([Answered(429), *UNFOUND], "", "429: too many requests"),
        ([Answered(503), *UNFOUND], "", "answered 503\ntry"),
        ([ValueError("it is a gated dataset")], "", f"at {PAGE}, or set another HF_TOKEN"),  # whoever has a token needs access
    ],
)
def test_the_cause_is_told_wherever_it_stands_in_the_chain(causes, offline, message, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
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


def test_a_mistyped_folder_may_look_like_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    told_of = reason_of(ConnectionError("no route"), "runs/digits", "model")
    assert told_of.startswith("no folder here has this name, and the Hub could not be reached, or the connection broke (")
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    for name, offline in (("runs/digits", ""), ("./runs", "1")):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        told_of = reason_of(ConnectionError("no route"), name, "model")
        assert told_of == "it is here, but no model is found in it (no route)\ncheck its files"


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


def test_a_revision_that_a_dataset_lacks_is_named():
    error = DatasetNotFoundError("Revision 'v99' doesn't exist for dataset 'some/thing' on the Hub.")
    assert reason_of(error, "some/thing", "dataset") == "it has no revision v99\nset --dataset_revision to one that it has"
