import hashlib
import importlib
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from utils.core.errors import UserError
from utils.data.dataset import load_images
from utils.evaluation.extractors import (
    DINOv2,
    Inception,
    RandomConvolutions,
    eight_bit,
    make_extractor,
    tensors_sha256,
    trained_classifier,
)
from utils.options.flags import DataOptions


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def digits(cache):
    return load_images(DataOptions(dataset_name="digits", resolution=16, image_channels=1, cache_dir=str(cache)))


def test_random_convolutions_are_the_same_everywhere_and_blind_to_the_random_state():
    torch.manual_seed(1)
    first = RandomConvolutions(3)
    torch.manual_seed(2)
    second = RandomConvolutions(3)
    assert first.sha256 == second.sha256 == tensors_sha256(second.state_dict())
    # Pinned: figures of other weights could not be compared with those that users have kept.
    assert first.sha256[:16] == "861a74cc8f4f95c0" and RandomConvolutions(1).sha256[:16] == "03495ecdbc5f18e8"
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    features = first(images)
    assert features.shape == (5, first.dimensions) and features.dtype == torch.float32
    assert torch.equal(features, second(images))
    torch.testing.assert_close(first(images[3:4]), features[3:4], rtol=1e-4, atol=1e-5)  # another batch, other kernels


@pytest.mark.parametrize("side", [1, 2, 5, 16, 100])
def test_random_convolutions_take_any_size(side):
    images = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
    assert RandomConvolutions(3)(images).isfinite().all()


@pytest.mark.slow
def test_the_classifier_learns_the_labels_and_is_kept(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("utils.evaluation.extractors._STEPS", 200)
    state = torch.random.get_rng_state()
    some = digits.subset(np.arange(600))
    trained = trained_classifier(some, tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert trained.accuracy > 0.9 and not any(weight.requires_grad for weight in trained.parameters())
    rest = digits.subset(np.arange(600, 1797))
    images = torch.from_numpy(rest.fetch(np.arange(len(rest))))
    with torch.no_grad():
        predicted = trained.probabilities(trained(images)).argmax(1)
    assert (predicted.numpy() == rest.labels).mean() > 0.85
    (path,) = tmp_path.iterdir()
    written = path.stat().st_mtime_ns
    again = trained_classifier(some, tmp_path)
    assert (again.sha256, again.accuracy, path.stat().st_mtime_ns) == (trained.sha256, trained.accuracy, written)


def test_the_classifier_needs_labels(digits):
    blank = digits.subset(np.arange(100))
    with pytest.raises(UserError, match="10 images of each"):
        trained_classifier(digits.subset(np.arange(50)), None)
    blank.labels = None
    with pytest.raises(UserError, match="--label_column"):
        make_extractor("classifier", blank)


def test_what_cannot_be_made_is_told_in_one_line(digits):
    with pytest.raises(UserError, match="unknown --features 'vgg'"):
        make_extractor("vgg", digits)
    with pytest.raises(UserError, match="needs the reference images"):
        make_extractor("classifier", None, channels=1)


def test_sixteen_bits_become_eight_as_a_png_would_have_them():
    assert eight_bit(np.array([0, 128, 129, 65535], np.uint16), 65535).tolist() == [0, 0, 1, 255]
    assert eight_bit(np.array([0, 200], np.uint8), 255).tolist() == [0, 200]


# ---- published weights


@pytest.fixture
def torch_fidelity(monkeypatch):
    """torch-fidelity, whose Inception needs nothing of the torchvision that its other parts import."""
    if importlib.util.find_spec("torch_fidelity") is None:
        pytest.skip("torch-fidelity is not installed")
    for name in ("", ".datasets", ".transforms", ".transforms.functional", ".models"):
        monkeypatch.setitem(sys.modules, f"torchvision{name}", MagicMock())
    return importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")


def test_inception_with_a_stand_in_of_its_weights(torch_fidelity, tmp_path):
    """Random weights in a file of the right format: the way to the features works; nothing is said about FID's values."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:  # it has no other way to be made without its weights
        patch.setattr(torch, "load", lambda *args, **kwargs: {})
        patch.setattr(torch.nn.Module, "load_state_dict", lambda self, state: None)
        network = torch_fidelity.FeatureExtractorInceptionV3("x", ["2048"], feature_extractor_weights_path="none")
    path = tmp_path / "stand-in.pth"
    torch.save(network.state_dict(), path)
    extractor = Inception(path, hashlib.sha256(path.read_bytes()).hexdigest())
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(extractor(images), network(images)[0], rtol=1e-4, atol=1e-5)
    assert extractor(images[:, :1]).shape == (2, 2048)
    assert (extractor.name, extractor.dimensions, extractor.standardized) == ("inception", 2048, False)


def test_inception_names_file_and_package(tmp_path):
    with pytest.raises(UserError, match=r"cannot read --feature_weights .*missing.pth"):
        Inception(tmp_path / "missing.pth")
    other = tmp_path / "other.pth"
    other.write_bytes(b"something else")
    with pytest.raises(UserError, match=r"other.pth has the SHA-256 [0-9a-f]{16}..., not 6726825d"):
        Inception(other)


def test_dinov2_names_files(tmp_path):
    with pytest.raises(UserError, match=r"has no config.json\nset --feature_weights .* of a DINOv2 model"):
        DINOv2(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot read --feature_weights .*model.safetensors"):
        DINOv2(tmp_path)


def test_inception_weights_cannot_run_code(torch_fidelity, tmp_path):
    class Code:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "it-ran",))

    path = tmp_path / "code.pth"
    torch.save({"weights": Code()}, path)
    with pytest.raises(UserError, match="does not have the weights of Inception v3"):
        Inception(path, hashlib.sha256(path.read_bytes()).hexdigest())
    assert not (tmp_path / "it-ran").exists()


def test_dinov2_reads_a_local_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=224, patch_size=14
    )
    network = transformers.Dinov2Model(config).eval()
    network.save_pretrained(tmp_path)
    extractor = DINOv2(tmp_path)
    images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    pixels = (images / 255 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(
        3, 1, 1
    )
    with torch.no_grad():
        expected = network(pixel_values=pixels).pooler_output  # the CLS token after the final norm
    torch.testing.assert_close(extractor(images), expected, rtol=1e-4, atol=1e-4)
    assert extractor(images[:, :1, :32, :32]).shape == (2, 32)
    with pytest.raises(UserError, match="has the SHA-256"):
        DINOv2(tmp_path, "00")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if "layer.1." not in name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"does not have a DINOv2 model: .* weights are missing, such as encoder.layer.1"):
        DINOv2(tmp_path)
