"""A class-conditional train_ddpm.py: what it tells its network, and what it exports."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import made_elsewhere, step_seen
from diffusers import ConsistencyModelPipeline, DDIMScheduler, DDPMScheduler

import train_ddpm
from models.guided_pipeline import ClassDDPMPipeline
from utils.core.errors import UserError
from utils.diffusion.classes import classes_known
from utils.diffusion.pipelines import image_shape, load_network, names_of_classes

CLASSES = ["--class_conditional", "--label_dropout", "0.2", "--guidance", "2"]


@pytest.fixture(scope="module")
def finished(train, tiny_flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    flags = ["--checkpointing_steps", "4", "--validation_images", "16", "--validation_steps", "4", "--save_images_steps", "4"]
    assert train([*tiny_flags, *CLASSES, *flags, "--output_dir", folder]) == 0
    return folder


def test_the_doctor_sees_the_labels_and_finds_nothing(finished):
    stages, found = step_seen(finished)
    assert {"data", "condition"} <= stages and found == {}


def test_what_it_exports(finished):
    unet, _ = load_network(str(finished))
    assert unet.config.num_class_embeds == 11 and classes_known(unet) == 10 and image_shape(unet) == (1, 16, 16)
    assert names_of_classes(str(finished)) == [str(digit) for digit in range(10)]
    card = (finished / "README.md").read_text()
    assert "- class-conditional-image-generation" in card and "- ddpm" in card and "- edm2" not in card
    assert "| Class names | 0, 1, 2" in card
    averaged, _ = load_network(str(finished / "checkpoint-8"))
    assert all(torch.equal(a, b) for a, b in zip(averaged.parameters(), unet.parameters()))


def test_its_pipeline_asks_for_classes(finished):
    unet, config = load_network(str(finished))
    pipeline = ClassDDPMPipeline(unet, DDPMScheduler.from_config(config))
    pipeline.set_progress_bar_config(disable=True)

    def images(**asked) -> torch.Tensor:
        noise = torch.Generator().manual_seed(0)
        return pipeline(generator=noise, num_inference_steps=2, output_type="pt", **asked).images

    left_open = images()
    assert not torch.equal(left_open, images(class_labels=3))
    # Guidance of 0 is the prediction without a class.
    torch.testing.assert_close(images(class_labels=3, guidance_scale=0.0), left_open)
    with pytest.raises(ValueError, match=r"moves away from no class"):
        images(guidance_scale=2.0)


@pytest.mark.slow
def test_diffusers_alone_samples_from_the_folder(finished, tmp_path):
    unet, config = load_network(str(finished))
    pipeline = ClassDDPMPipeline(unet, DDPMScheduler.from_config(config))
    pipeline.set_progress_bar_config(disable=True)
    asked = {"class_labels": [3, 7], "guidance_scale": 2.0, "num_inference_steps": 3, "output_type": "np"}
    expected = pipeline(generator=torch.Generator().manual_seed(0), **asked).images
    found = made_elsewhere(finished, tmp_path, class_labels=["3", "7"], guidance_scale=2.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    # As docs/pipelines.md has it.
    plain = ConsistencyModelPipeline(unet, DDIMScheduler.from_pretrained(finished, subfolder="scheduler"))
    assert np.isfinite(plain(class_labels=[0], num_inference_steps=3, output_type="np").images).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--guidance", "2"], "set --class_conditional"),
        (["--label_dropout", "0.2"], "set --class_conditional"),
        (["--class_conditional", "--label_dropout", "0", "--guidance", "2"], "set --label_dropout"),
    ],
)
def test_flags_that_do_nothing_are_refused(tiny_flags, flags, message):
    with pytest.raises(UserError, match=message):
        train_ddpm.parse_args([*tiny_flags, *flags])


def test_data_without_labels_is_refused(train, tiny_flags, tmp_path):
    from PIL import Image

    (tmp_path / "images").mkdir()
    for number in range(12):
        Image.fromarray(np.full((16, 16), number * 20, np.uint8)).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "images" / "train.csv").write_text("id,label\n0,cat\n")
    flags = [flag for flag in tiny_flags if flag not in ("--dataset_name", "digits")]
    with pytest.raises(UserError, match=r"needs class labels, and the data has none; 12 of 13 files used.*\nput the"):
        train([*flags, "--train_data_dir", tmp_path / "images", *CLASSES, "--output_dir", tmp_path / "run"])
