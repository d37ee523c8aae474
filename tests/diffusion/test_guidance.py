"""Classes and guidance in generate.py."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import DDPMScheduler
from test_edm2_unet import tiny
from test_sampling import tiny_unet

import generate
from models.edm_heun import EDMHeunScheduler
from models.guided_pipeline import ClassDDPMPipeline, EDM2Pipeline, guided
from utils.core.errors import UserError
from utils.core.images import is_complete_png
from utils.diffusion.export import export_pipeline
from utils.diffusion.guidance import asked_classes, make_guided_prediction
from utils.diffusion.pipelines import load_network

CONFIG = EDMHeunScheduler().config


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """A pipeline, a guide for it, and one of other data."""
    folder = tmp_path_factory.mktemp("pipelines")
    for name, unet in (
        ("main", tiny()),
        ("guide", tiny(model_channels=4, attention_head_dim=4)),
        ("other", tiny(sample_size=16)),
    ):
        export_pipeline(unet, EDMHeunScheduler(), folder / name, "")
    return folder


def run(*words) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    generate.main(generate.parse_args([str(word) for word in words]))


def make(pipelines, output_dir, *words) -> list[bytes]:
    run("--pipeline", pipelines / "main", "--num_images", 6, "--num_inference_steps", 3, "--output_dir", output_dir, *words)
    return [(output_dir / f"{i:06d}.png").read_bytes() for i in range(6)]


def test_images_are_of_the_classes_asked_for(pipelines, tmp_path):
    in_turn = make(pipelines, tmp_path / "all")
    assert is_complete_png(tmp_path / "all/000005.png", (8, 8))
    named = make(pipelines, tmp_path / "named", "--class_labels", 0, 1, 2)
    assert named == in_turn
    other = make(pipelines, tmp_path / "other", "--class_labels", 0, 2)
    assert other[0] == in_turn[0] and other[1] != in_turn[1] and other[2] != in_turn[2]
    settings = json.loads((tmp_path / "other/generate.json").read_text())
    assert settings["class_labels"] == [0, 2] and settings["sampler"] == "heun"
    with pytest.raises(UserError, match="images with another --class_labels"):
        make(pipelines, tmp_path / "other")


def test_classes_are_asked_for_by_name(pipelines, tmp_path):
    unet = tiny()
    export_pipeline(unet, EDMHeunScheduler(), tmp_path / "p", "", class_names=["cat", "dog", "red fox"])
    pipeline = ["--pipeline", tmp_path / "p"]
    by_name = make(pipelines, tmp_path / "named", "--class_labels", "red fox", "dog", 0, *pipeline)
    assert by_name == make(pipelines, tmp_path / "numbered", "--class_labels", 2, 1, 0, *pipeline)
    assert json.loads((tmp_path / "named/generate.json").read_text())["class_labels"] == [2, 1, 0]
    with pytest.raises(UserError, match=r"--class_labels dogs: .*\ndid you mean dog\? its classes: cat, dog, red fox"):
        make(pipelines, tmp_path / "out", "--class_labels", "dogs", *pipeline)
    with pytest.raises(UserError, match=r"--class_labels cat: .*\nuse numbers from 0 to 2: its classes have no names"):
        make(pipelines, tmp_path / "out", "--class_labels", "cat")


MEANT = [  # names of three classes; what is asked for; the number that it means, None: it is refused
    (["1", "2", "3"], {"1": 0, "2": 1, "3": 2, "#0": 0, "#1": 1, "0": None, "4": None, "#3": None, "²": None, "01": None}),
    (["1.5", "2.5", "x"], {"1.5": 0, "x": 2, "1": None, "#1": 1}),  # "1" is too near to a name
    (["cat", "dog", "red fox"], {"red fox": 2, "1": 1, "#1": 1, "3": None, "-1": None, "#-1": None, "²": None, "": None}),
    (["#1", "²", "x"], {"#1": 0, "²": 1, "1": 1, "#2": 2, "#": None}),
    ([], {"0": 0, "2": 2, "#2": 2, "3": None, "cat": None, "9" * 5000: None}),
]


@pytest.mark.parametrize(("names", "meant"), MEANT)
def test_scripts_and_pipelines_take_the_same_text_for_the_same_class(names, meant):
    edm2, ddpm = tiny().eval(), tiny_unet(num_class_embeds=4).eval()
    id2label = dict(enumerate(names)) or None
    pipelines = EDM2Pipeline(edm2, EDMHeunScheduler(), id2label), ClassDDPMPipeline(ddpm, DDPMScheduler(), id2label)
    told = []  # what the networks are told
    for pipeline in pipelines:
        pipeline.set_progress_bar_config(disable=True)
        pipeline.unet.register_forward_pre_hook(lambda module, inputs: told.append(inputs[2].tolist()))
    for text, number in meant.items():
        for pipeline in pipelines:
            asked = {"class_labels": [text, 2], "num_inference_steps": 1, "output_type": "latent"}
            if number is None:
                with pytest.raises(ValueError, match=r"^class_labels .*: the pipeline has no such class\n"):
                    pipeline(**asked)
            else:
                pipeline(**asked)
                assert told.pop() == [number, 2] and not told, text
        for unet in (edm2, ddpm):
            if number is None:
                with pytest.raises(UserError, match=r"^--class_labels .*: the pipeline has no such class\n"):
                    asked_classes([text], names, unet)
            else:
                assert asked_classes([text, "#2"], names, unet) == [number, 2], text


def test_guidance_changes_the_images_and_is_on_record(pipelines, tmp_path):
    plain = make(pipelines, tmp_path / "plain")
    free = make(pipelines, tmp_path / "free", "--guidance", 2)
    guided_ = make(pipelines, tmp_path / "guided", "--guidance", 2, "--guide_pipeline", pipelines / "guide")
    assert all(a != b and b != c and a != c for a, b, c in zip(plain, free, guided_))
    settings = json.loads((tmp_path / "guided/generate.json").read_text())
    assert settings["guidance"] == 2.0 and len(settings["guide_sha256"]) == 64


def test_prediction_is_guided_by_class():
    unet, guide = tiny().eval(), tiny(model_channels=4, attention_head_dim=4).eval()
    x, numbers = torch.randn(4, 1, 8, 8), torch.arange(4, 8)
    level = torch.tensor(0.3)
    with torch.no_grad():
        predict = make_guided_prediction(unet, CONFIG, [2, 0, 1], 1.5, guide, CONFIG)
        expected = guided(unet, x, level, torch.tensor([0, 1, 2, 0]), 1.5, guide)  # numbers 4 ... 7 modulo 3
        assert torch.equal(predict(x, level, numbers), expected)
        unconditional = tiny(num_class_embeds=0).eval()
        predict = make_guided_prediction(unconditional, CONFIG)
        assert torch.equal(predict(x, level, numbers), unconditional(x, level).sample)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--class_labels", "3"], "no such class\nuse numbers from 0 to 2"),
        (["--guide_pipeline", "guide"], "--guide_pipeline needs --guidance"),
        (["--guide_pipeline", "other", "--guidance", "2"], "--guide_pipeline does not fit"),
        (["--sampler", "ddim"], "--sampler ddim does not work .*\nchoose from heun, dpmsolver"),
    ],
)
def test_what_cannot_be_asked_for_is_named(pipelines, tmp_path, words, message):
    words = [pipelines / word if word in ("guide", "other") else word for word in words]
    with pytest.raises(UserError, match=message):
        make(pipelines, tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_a_network_of_ddpm_is_asked_by_class_and_without_one():
    config, unet = {"beta_schedule": "linear"}, tiny_unet(num_class_embeds=4).eval()
    x, numbers, step = torch.randn(4, 1, 8, 8), torch.arange(4, 8), torch.tensor(30)
    with torch.no_grad():
        of_class, without = (unet(x, step, torch.tensor(labels)).sample for labels in ([2, 0, 2, 0], [3, 3, 3, 3]))
        found = make_guided_prediction(unet, config, [2, 0], 1.5)(x, step, numbers)
    torch.testing.assert_close(found, without + 1.5 * (of_class - without))
    with pytest.raises(UserError, match=r"--class_labels 3: .*\nuse numbers from 0 to 2"):
        asked_classes(["3"], [], unet)  # that of no class


def test_an_unconditional_ddpm_takes_no_classes():
    config, unet = {"beta_schedule": "linear"}, tiny_unet()
    with pytest.raises(UserError, match=r"no classes, .*\nset --guide_pipeline"):
        make_guided_prediction(unet, config, guidance=2.0)
    with pytest.raises(UserError, match="--class_labels 0: the pipeline has no classes\nleave it out"):
        asked_classes(["0"], [], unet)
    assert make_guided_prediction(unet, config) is None
    with pytest.raises(UserError, match=r"no classes, .*\nset --guide_pipeline"):
        make_guided_prediction(tiny(num_class_embeds=0), CONFIG, guidance=2.0)


def test_loading_runs_no_code_of_the_pipeline(pipelines):
    code = pipelines / "main/unet/edm2_unet.py"
    text = code.read_text()
    code.write_text("raise SystemExit('run')\n")
    try:
        unet, _ = load_network(str(pipelines / "main"))
    finally:
        code.write_text(text)
    for name, tensor in tiny().state_dict().items():
        loaded = unet.state_dict()[name]
        assert torch.equal(tensor, loaded) and (loaded.data_ptr() - tensor.data_ptr()) % 64 == 0  # no place in the mapped file
