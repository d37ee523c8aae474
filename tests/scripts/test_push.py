"""The way to the Hub, against a local stand-in: asked before the training, pushed after it or alone."""

import json
import re
from pathlib import Path

import huggingface_hub.constants
import pytest
from conftest import ROOT, run_command, script_command, script_environment, without_progress
from hub_stand_in import hub_for_pushes
from PIL import Image

from utils.core.errors import UserError
from utils.diffusion.hub import check_hub
from utils.options.flags import DDPMOptions
from utils.options.parser import parse_options
from utils.training.run import pushes_alone

REFUSED = [
    ({"hub_token": "hf_wrong"}, r"the Hub does not accept the token .*\nset another --hub_token$"),
    ({"hub_token": None}, r"the Hub does not accept the token .*\nset another HF_TOKEN$"),
    ({"hub_token": "hf_read"}, r"the token 'mine' can only read\nmake a token with write access"),
    ({"hub_model_id": "others/run"}, r"the token may not write there \(You don't have the rights to create"),
    ({"hub_model_id": "others/theirs"}, r"the token may not write there \(.*not the required permissions"),
    ({"hub_model_id": "a b"}, r"this is not a name of a repository\nset --hub_model_id"),
    ({"hub_token": "hf_fine", "hub_model_id": "me/other"}, "the token may not write there"),
]


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with hub_for_pushes(("others/theirs", "me/there")) as (address, repositories):
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield address, repositories


def options(**given) -> DDPMOptions:
    return DDPMOptions(**{"output_dir": "runs/tidy", "hub_token": "hf_write", **given})


@pytest.mark.parametrize(("given", "reason"), REFUSED)
def test_what_the_hub_would_refuse_is_one_line(hub, given, reason):
    with pytest.raises(UserError, match=rf"^cannot push to \S+( b)?: {reason}") as caught:
        check_hub(options(**given))
    assert str(caught.value).count("\n") == 1
    assert hub[1].keys() == {"others/theirs", "me/there"}


def test_without_a_token_a_network_or_leave(monkeypatch, hub):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere")
    with pytest.raises(
        UserError, match=r"there is no token\nmake one at .*, then run `hf auth login`, or set HF_TOKEN or --hub_token"
    ):
        check_hub(options(hub_token=None))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens
    with pytest.raises(UserError, match=r"the Hub cannot be reached \(Connect"):
        check_hub(options())


def test_a_repository_is_made_or_taken(hub):
    address, repositories = hub
    assert check_hub(options(hub_private_repo=True)) == f"{address}/me/tidy"
    assert repositories["me/tidy"][""] == {"name": "tidy", "organization": None, "visibility": "private"}
    assert check_hub(options(hub_model_id="me/there")) == f"{address}/me/there"
    assert check_hub(options(hub_token="hf_fine", hub_model_id="me/open")) == f"{address}/me/open"


@pytest.mark.slow
def test_a_run_pushes_and_a_finished_one_pushes_alone(tiny_flags, tmp_path):
    photos = tmp_path / "somewhere" / "photos"
    photos.mkdir(parents=True)
    for number in range(16):
        Image.new("L", (16, 16), 10 * number).save(photos / f"{number}.png")
    folder = tmp_path / "elsewhere" / "gray"
    tiny = tiny_flags[2:]  # without the name of the digits
    run = [*tiny, "--train_data_dir", photos, "--output_dir", folder, "--max_train_steps", 2, "--logger", "tensorboard"]
    push = ["--push_to_hub", "--hub_token", "hf_write"]
    with hub_for_pushes() as (address, repositories):
        environment = script_environment() | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}

        def start(flags: list) -> str:
            done = run_command(script_command("train_ddpm.py", flags), environment)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr

        said = start([*run, *push])
        first, last = f"will be pushed to {address}/me/gray", f"pushed to {address}/me/gray"
        assert said.index(first) < said.index("max_train_steps 2") < said.rindex(last)
        pushed = dict(repositories.pop("me/gray"))
        assert pushed.pop("") == {"name": "gray", "organization": None}
        assert {name for name in pushed if not name.startswith("samples/")} == {
            *("README.md", "model_index.json", "scheduler/scheduler_config.json"),
            *("unet/config.json", "unet/diffusion_pytorch_model.safetensors"),
        }
        card = pushed["README.md"].decode()
        assert 'from_pretrained("me/gray")' in card and "photos: 16 images" in card and "--train_data_dir photos" in card
        for name, content in pushed.items():
            assert str(tmp_path).encode() not in content and str(ROOT).encode() not in content, name
        trained = (folder / "unet/diffusion_pytorch_model.safetensors").stat().st_mtime_ns
        said = start(["--output_dir", folder, *push, "--hub_model_id", "me/again"])
        assert "holds a finished run: its pipeline will be pushed, nothing is trained" in said and "max_train_steps" not in said
        assert (folder / "unet/diffusion_pytorch_model.safetensors").stat().st_mtime_ns == trained
        again = repositories["me/again"]
        assert 'from_pretrained("me/again")' in again["README.md"].decode()
        assert {name: again[name] for name in pushed if name != "README.md"} == {
            name: content for name, content in pushed.items() if name != "README.md"
        }


@pytest.mark.slow
def test_a_refused_push_stops_the_run_before_it_has_a_folder(tiny_flags, tmp_path):
    with hub_for_pushes() as (address, _):
        environment = script_environment() | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        flags = [*tiny_flags, "--output_dir", tmp_path / "run", "--push_to_hub", "--hub_token", "hf_read"]
        done = run_command(script_command("train_ddpm.py", flags), environment)
    assert done.returncode == 2
    assert re.findall("^error: .*", done.stderr, re.MULTILINE) == without_progress(done.stderr)[-2:-1]
    assert "the token 'mine' can only read" in done.stderr and not (tmp_path / "run").exists()


def test_only_a_finished_run_and_no_other_is_pushed_alone(tmp_path):
    def asks(*flags: str) -> bool:
        return pushes_alone(parse_options(DDPMOptions, "", ["--output_dir", str(tmp_path), *flags]))

    recorded = json.loads(json.dumps(parse_options(DDPMOptions, "", ["--learning_rate", "0.5"]).recorded()))
    Path(tmp_path, "options.json").write_text(json.dumps({"options": recorded}))
    Path(tmp_path, "model_index.json").write_text("{}")
    assert not asks("--push_to_hub")  # it goes on, or has crashed
    Path(tmp_path, "exit_status").write_text("75\n")
    assert not asks("--push_to_hub")
    Path(tmp_path, "exit_status").write_text("0\n")
    assert asks("--push_to_hub")
    assert asks("--push_to_hub", "--learning_rate", "0.5", "--resume_from_checkpoint", "latest")
    assert asks("--push_to_hub", "--max_train_steps", "3600", "--hub_model_id", "other", "--logging_steps", "7")
    for others in ("--learning_rate 0.1", "--max_train_steps 9999", "--overwrite_output_dir", "--dry_run"):
        assert not asks("--push_to_hub", *others.split())
    assert not asks()
