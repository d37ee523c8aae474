"""The exported EDM2 pipeline works where this repository is not."""

import numpy as np
import pytest
import torch
from conftest import made_elsewhere
from test_edm2_unet import tiny

from models.edm_heun import EDMHeunScheduler
from models.guided_pipeline import EDM2Pipeline
from utils.diffusion.export import export_pipeline
from utils.diffusion.model_card import model_card


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edm2") / "run"
    names = ["ant", "bee", "cow"]
    card = model_card({"carries_code": True, "classes": 3, "class_names": names})
    export_pipeline(tiny(), EDMHeunScheduler(sigma_data=0.4), folder, card, class_names=names)
    return folder


@pytest.mark.slow
def test_loads_in_a_fresh_interpreter_elsewhere_and_samples_the_same(folder, tmp_path):
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    code = {"guided_pipeline.py", "unet/edm2_unet.py", "scheduler/edm_heun.py"}
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert files == {"model_index.json", "README.md", "unet/config.json", "scheduler/scheduler_config.json", weights, *code}
    found = made_elsewhere(folder, tmp_path, class_labels=["ant", "cow"], guidance_scale=1.5)
    pipeline = EDM2Pipeline(tiny().eval(), EDMHeunScheduler(sigma_data=0.4))
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    asked = {"class_labels": [0, 2], "guidance_scale": 1.5, "num_inference_steps": 3, "output_type": "np"}
    expected = pipeline(generator=noise, **asked).images
    # In [0, 1], and begun at 80 x normal noise, up to 300: fp32 goes in steps of 3e-5 there.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


def test_model_card_says_that_loading_runs_code(folder):
    card = (folder / "README.md").read_text()
    assert "Loading it runs the Python files" in card and "trust_remote_code=True" in card and "- edm2" in card
    assert 'class_labels=["ant"]' in card and "class_labels=[0]" in model_card({"carries_code": True, "classes": 3})
