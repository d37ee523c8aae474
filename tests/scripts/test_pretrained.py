"""Fine-tuning, --pretrained: what is taken of a pipeline, what is refused, what a resume needs, and what stays as it was."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY_EDM2_NETWORK, TINY_NETWORK, make_tiny_flags, same_bytes, step_seen
from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel
from safetensors.torch import load_file

import train_ddpm
import train_edm2
from models.edm2_unet import EDM2UNet
from models.edm_heun import EDMHeunScheduler
from utils.core.errors import UserError
from utils.diffusion.ddpm import make_noise_scheduler
from utils.diffusion.export import export_pipeline
from utils.diffusion.pipelines import load_network
from utils.training.pretrained import Pretrained, load_weights

LETTERS = ["a", "b", "c"]
ATTENTION = {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
PAGE = (ROOT / "docs/fine-tuning.md").read_text().replace("\\\n", " ")
DOCUMENTED = re.findall(r"^accelerate launch train_ddpm\.py (.*)$", PAGE, re.MULTILINE)


def network(**others) -> UNet2DModel:
    torch.manual_seed(1)
    return UNet2DModel(**TINY_NETWORK | {"sample_size": 16} | others)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    """A small one of ours, which predicts v on the cosine schedule."""
    folder = tmp_path_factory.mktemp("pipeline")
    scheduler = make_noise_scheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    export_pipeline(network(), scheduler, folder, "")
    return folder


@pytest.fixture(scope="module")
def strange(tmp_path_factory) -> Path:
    """Another's: older weights in fp16, a schedule of its own, and samples that are not clipped."""
    folder = tmp_path_factory.mktemp("strange")
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)
    DDIMPipeline(network().half(), scheduler).save_pretrained(folder, safe_serialization=False, variant="fp16")
    return folder


@pytest.fixture(scope="module")
def flags(tiny_flags) -> list[str]:
    """Of a run that starts from a pipeline: the data and the length."""
    return without(tiny_flags, "--model_config_name_or_path", "--learning_rate", "--resolution", "--image_channels")


def without(flags: list[str], *names: str) -> list[str]:
    return [word for word, before in zip(flags, ["", *flags]) if word not in names and before not in names]


def found_in(folder: Path) -> set[str]:
    """Codes of what the doctor found in the step of a run that it measured."""
    stages, found = step_seen(folder)
    assert {"data", "noise", "input", "target", "weight", "gradient", "optimizer", "ema", "state"} <= stages
    return set(found)


def recorded(folder: Path) -> dict:
    return json.loads((folder / "options.json").read_text())["options"]


def test_network_and_schedule_are_taken_and_shown_before_the_first_update(train, flags, pipeline, tmp_path):
    assert train([*flags, "--pretrained", pipeline, "--output_dir", tmp_path, "--lr_warmup_steps", "0"]) == 0
    taken = {"prediction_type": "v_prediction", "ddpm_beta_schedule": "squaredcos_cap_v2", "resolution": 16}
    taken |= {"image_channels": 1, "learning_rate": 1e-5}
    assert recorded(tmp_path).items() >= taken.items()
    assert (tmp_path / "samples/0000000.png").exists() and found_in(tmp_path) == set()
    unet, scheduler = load_network(str(tmp_path))
    assert scheduler["prediction_type"] == "v_prediction" and scheduler["beta_schedule"] == "squaredcos_cap_v2"
    # Eight updates of 1e-5 each move a weight by 1e-4 at most, and averages begin with the pipeline's.
    before = network().state_dict()
    moved = [float((tensor - before[name]).abs().max()) for name, tensor in unet.state_dict().items()]
    assert 0 < max(moved) < 1.2e-4
    assert "| Fine-tuned from |" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_a_pipeline_of_others_keeps_its_schedule_and_its_way_to_sample(train, flags, strange, tmp_path):
    assert train([*flags, "--pretrained", strange, "--output_dir", tmp_path]) == 0
    assert found_in(tmp_path) == set()
    _, scheduler = load_network(str(tmp_path))
    kept = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
    assert scheduler.items() >= kept.items()


@pytest.mark.slow
def test_resumed_without_the_pipeline_equals_uninterrupted_bit_for_bit(train, flags, pipeline, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(pipeline, copy)
    flags = [*flags, "--pretrained", copy, "--checkpointing_steps", "4", "--lr_scheduler", "constant"]
    assert train([*flags, "--output_dir", tmp_path / "whole"]) == 0
    assert train([*flags, "--output_dir", tmp_path / "run", "--max_train_steps", "4"]) == 0
    shutil.rmtree(copy)
    shutil.rmtree(tmp_path / "run" / "unet")  # nor is the run's own pipeline needed
    assert train([*flags, "--output_dir", tmp_path / "run", "--resume_from_checkpoint", "latest"]) == 0
    for name in ("model.safetensors", "ema.safetensors", "optimizer.bin"):
        assert same_bytes(tmp_path / "run/checkpoint-8" / name, tmp_path / "whole/checkpoint-8" / name)
    assert found_in(tmp_path / "run") == set()
    with pytest.raises(UserError, match=r"pretrained: .*copy in the checkpoint, None now"):
        train([*without(flags, "--pretrained"), "--output_dir", tmp_path / "run", "--resume_from_checkpoint", "latest"])


def test_only_the_named_layers_are_trained(train, flags, pipeline, tmp_path):
    only = ["--train_only", "up_blocks.*", "conv_out.*"]
    flags = [*flags, "--pretrained", pipeline, *only, "--output_dir", tmp_path, "--learning_rate", "1e-3"]
    assert train([*flags, "--checkpointing_steps", "8"]) == 0
    assert found_in(tmp_path) == set()
    before, after = network().state_dict(), load_file(tmp_path / "checkpoint-8/model.safetensors")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed and all(name.startswith(("up_blocks.", "conv_out.")) for name in changed)
    averaged = load_file(tmp_path / "checkpoint-8/ema.safetensors")
    assert all(torch.equal(averaged[name], before[name]) for name in averaged if name in before and name not in changed)


def test_there_are_documented_commands():
    assert len(DOCUMENTED) > 1 and any("--train_only" in command for command in DOCUMENTED)


@pytest.mark.parametrize("command", DOCUMENTED)
def test_documented_commands_train_a_network_with_attention(train, flags, tmp_path, command):
    """Attention leaves another layout in memory, of which torch's kernels for a CPU do not take all."""
    noise_scheduler = make_noise_scheduler(beta_schedule="linear", prediction_type="epsilon")
    export_pipeline(network(**ATTENTION), noise_scheduler, tmp_path / "start", "")
    documented = without(shlex.split(command), "--pretrained", "--train_data_dir", "--output_dir")
    here = ["--pretrained", tmp_path / "start", "--output_dir", tmp_path / "run", "--max_train_steps", "2"]
    assert train([*flags, *documented, *here]) == 0
    assert found_in(tmp_path / "run") == set()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prediction_type", "epsilon"], "--prediction_type epsilon: .* was trained with v_prediction"),
        (["--ddpm_beta_schedule", "linear"], "--ddpm_beta_schedule linear: .* was trained with squaredcos_cap_v2"),
        (["--image_channels", "3"], "--image_channels 3: .* was trained with 1"),
        (["--resolution", "17"], "--resolution 17 does not divide by"),
        (["--model_preset", "digits16"], "--model_preset and --pretrained: the pipeline has its own network"),
        (["--train_only", "up_block.*"], r"--train_only up_block\.\* matches no parameter\nthe names begin with conv_in"),
        (["--pretrained", "nowhere"], "cannot load a pipeline from nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(train, flags, pipeline, tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        train([*flags, "--pretrained", pipeline, *more, "--output_dir", tmp_path / "run"])
    assert not (tmp_path / "run" / "options.json").exists()


def test_layers_of_a_random_network_are_not_frozen(tiny_flags):
    with pytest.raises(UserError, match="--train_only needs --pretrained"):
        train_ddpm.parse_args([*tiny_flags, "--train_only", "up_blocks.*"])


def test_each_script_takes_its_own_kind(train, flags, pipeline, tmp_path):
    flags = without(flags, "--ddpm_num_inference_steps")
    with pytest.raises(UserError, match=r"contains a UNet2DModel\nfine-tune it with train_ddpm\.py"):
        train([*flags, "--pretrained", pipeline, "--output_dir", tmp_path], script=train_edm2)


def started(weights: dict, class_names: list[str]) -> Pretrained:
    return Pretrained("it", {}, {}, (1, 16, 16), dict(weights), class_names)


def test_classes_are_matched_by_name_and_new_ones_start_as_no_class():
    old, new = network(num_class_embeds=4), network(num_class_embeds=5)
    start = started(old.state_dict(), LETTERS)
    load_weights(new, start, ["c", "d", "a", "e"])
    table, known = new.class_embedding.weight, old.class_embedding.weight
    assert torch.equal(table, known[[2, 3, 0, 3, 3]])
    assert start.notes[1:] == ["new classes: d, e", "classes of the pipeline that the data does not have, and that go: 1 of 3"]
    unnamed = started(old.state_dict(), [])
    load_weights(new, unnamed, ["c", "d", "a", "e"])
    assert torch.equal(new.class_embedding.weight, known[[0, 1, 2, 3, 3]])


def test_a_network_that_gets_classes_starts_with_the_output_that_it_had():
    old, new = network().eval(), network(num_class_embeds=4).eval()
    load_weights(new, started(old.state_dict(), []), LETTERS)
    x, steps = torch.randn(4, 1, 16, 16), torch.arange(4)
    with torch.no_grad():
        assert torch.equal(new(x, steps, torch.arange(4)).sample, old(x, steps).sample)


@pytest.mark.slow
def test_a_class_conditional_pipeline_goes_on_by_class(train, flags, tmp_path):
    scheduler = make_noise_scheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    export_pipeline(network(num_class_embeds=4), scheduler, tmp_path / "p", "", class_names=LETTERS)
    flags = [*flags, "--pretrained", tmp_path / "p", "--output_dir", tmp_path / "run"]
    with pytest.raises(UserError, match="is class-conditional\nadd --class_conditional"):
        train(flags)
    assert train([*flags, "--class_conditional"]) == 0
    assert found_in(tmp_path / "run") == set() and load_network(str(tmp_path / "run"))[0].config.num_class_embeds == 11


@pytest.mark.slow
def test_an_edm2_pipeline_is_fine_tuned_with_more_classes(train, tmp_path):
    torch.manual_seed(1)
    unet = EDM2UNet(**TINY_EDM2_NETWORK | {"sample_size": 16, "num_class_embeds": 3})
    export_pipeline(unet, EDMHeunScheduler(sigma_data=0.7), tmp_path / "p", "", class_names=["2", "1", "x"])
    made = make_tiny_flags(tmp_path, "train_edm2.py")
    flags = [*without(made, "--model_config_name_or_path", "--learning_rate"), "--pretrained", tmp_path / "p"]
    flags += ["--checkpointing_steps", "4", "--lr_scheduler", "constant"]
    assert train([*flags, "--output_dir", tmp_path / "whole"], script=train_edm2) == 0
    assert recorded(tmp_path / "whole").items() >= {"sigma_data": 0.7, "learning_rate": 1e-3}.items()
    assert found_in(tmp_path / "whole") == set() and (tmp_path / "whole/samples/0000000.png").exists()
    assert train([*flags, "--output_dir", tmp_path / "run", "--max_train_steps", "4"], script=train_edm2) == 0
    shutil.rmtree(tmp_path / "p")
    assert train([*flags, "--output_dir", tmp_path / "run", "--resume_from_checkpoint", "latest"], script=train_edm2) == 0
    assert same_bytes(tmp_path / "run/checkpoint-8/model.safetensors", tmp_path / "whole/checkpoint-8/model.safetensors")
    with pytest.raises(UserError, match=r"--sigma_data 0\.5: .* was trained with 0\.7"):
        train(
            [*flags, "--sigma_data", "0.5", "--resume_from_checkpoint", "latest", "--output_dir", tmp_path / "run"], train_edm2
        )
