import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import UNet2DModel

from utils.core.errors import UserError
from utils.diffusion.unet import make_unet, plain_state_dict
from utils.options.flags import DDPMOptions


def parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


def test_presets_have_the_published_sizes():
    with torch.device("meta"):
        assert parameters(make_unet(DDPMOptions(resolution=32, image_channels=3, model_preset="cifar10"))) == 35_746_307
        # The network that diffusers' train_unconditional.py builds when no config is named, written out here.
        theirs = UNet2DModel(
            sample_size=64,
            in_channels=3,
            out_channels=3,
            layers_per_block=2,
            block_out_channels=(128, 128, 256, 256, 512, 512),
            down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
        )
        ours = make_unet(DDPMOptions(resolution=64, image_channels=3))
    ignored = ("_use_default_values",)
    assert {k: v for k, v in ours.config.items() if k not in ignored} == {
        k: v for k, v in theirs.config.items() if k not in ignored
    }


def tiny(**options) -> UNet2DModel:
    return make_unet(DDPMOptions(resolution=16, image_channels=1, model_preset="digits16", **options))


def test_weights_are_a_function_of_the_seed_and_leave_the_global_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = tiny(seed=1), tiny(seed=1), tiny(seed=2)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    assert not torch.equal(first.conv_in.weight, other.conv_in.weight)


def test_zero_output_layer_predicts_zero_and_still_learns():
    unet = tiny(zero_init_output=True)
    output = unet(torch.randn(2, 1, 16, 16), torch.tensor([5, 500])).sample
    assert (output == 0).all()
    (output - 1).square().mean().backward()
    assert unet.conv_out.weight.grad.abs().sum() > 0
    assert unet.conv_in.weight.grad.abs().sum() == 0  # healthy: nothing passes the zeros in the first update


@pytest.mark.parametrize(("name", "expected"), [("xavier", 2 / (64 * 9 + 64 * 9)), ("he", 2 / (64 * 9))])
def test_initializations_have_the_variance_of_their_paper(name, expected):
    convolution = tiny(initialisation=name).mid_block.resnets[0].conv1
    assert convolution.weight.shape == (64, 64, 3, 3)
    assert convolution.weight.var().item() == pytest.approx(expected, rel=0.03)
    assert (convolution.bias == 0).all()


def test_activation_and_dropout_reach_the_network():
    unet = tiny(activation="mish", dropout=0.25)
    assert unet.config.act_fn == "mish"
    dropouts = {m.p for m in unet.modules() if isinstance(m, torch.nn.Dropout)}
    assert 0.25 in dropouts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolution": 30}, "no preset fits --resolution 30"),
        ({"resolution": 32, "model_preset": "cifar"}, "unknown --model_preset 'cifar'"),
        ({"resolution": 32, "model_config_name_or_path": "/nowhere"}, "cannot read --model_config_name_or_path /nowhere"),
        ({"resolution": 32, "initialisation": "orthogonal"}, "unknown --initialisation"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(UserError, match=message):
        make_unet(DDPMOptions(image_channels=3, **options))


def test_config_with_other_channels_is_refused(tmp_path):
    tiny().save_config(tmp_path)
    with pytest.raises(UserError, match="in_channels and out_channels are 1 and 1, but the images have 3"):
        make_unet(DDPMOptions(resolution=16, image_channels=3, model_config_name_or_path=str(tmp_path)))


def test_a_file_of_something_else_is_no_config(tmp_path):
    (tmp_path / "list.json").write_text('{"learning_rate": 1}')
    with pytest.raises(UserError, match=r"list.json: it is no config of a UNet2DModel\nuse a config.json"):
        make_unet(DDPMOptions(resolution=16, image_channels=3, model_config_name_or_path=str(tmp_path / "list.json")))


def test_spectral_norm_makes_the_largest_singular_value_one():
    unet = make_unet(
        DDPMOptions(resolution=16, image_channels=1, model_preset="digits16", spectral_norm=True, zero_init_output=True)
    )
    for _ in range(30):  # each forward pass is a step of the power iteration
        unet(torch.randn(2, 1, 16, 16), torch.tensor([10, 500]))
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    plain = plain_state_dict(unet)
    assert all(torch.equal(before[name], value) for name, value in unet.state_dict().items())
    sizes = {
        n: torch.linalg.matrix_norm(w.flatten(1), 2).item() for n, w in plain.items() if n.endswith("weight") and w.ndim > 1
    }
    assert sizes.pop("conv_out.weight") == 0.0
    assert len(sizes) > 20
    assert max(sizes.values()) < 1.05 and min(sizes.values()) > 0.95
    copy = UNet2DModel.from_config(unet.config)
    copy.load_state_dict(plain)
    x, t = torch.randn(2, 1, 16, 16), torch.tensor([10, 500])
    unet.conv_out.reset_parameters()
    copy.conv_out.load_state_dict(unet.conv_out.state_dict())
    torch.testing.assert_close(unet.eval()(x, t).sample, copy.eval()(x, t).sample, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_network_is_one_graph(checkpointing):
    """As it is trained: with Accelerate's autocast around it, dropout and both kinds of blocks."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = make_unet(
        DDPMOptions(resolution=16, image_channels=1, model_preset="digits16", dropout=0.1, gradient_checkpointing=checkpointing)
    )
    model = accelerator.prepare(model.train())
    found = torch._dynamo.explain(model)(torch.randn(2, 1, 16, 16), torch.tensor([1, 2]))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_channels_last_gives_the_same_output():
    plain, turned = (
        make_unet(DDPMOptions(resolution=16, image_channels=1, channels_last=last)).eval() for last in (False, True)
    )
    assert turned.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert turned.mid_block.resnets[0].conv1.weight.stride()[1] == 1
    images, timesteps = torch.randn(2, 1, 16, 16), torch.tensor([3, 700])
    with torch.no_grad():
        torch.testing.assert_close(plain(images, timesteps).sample, turned(images, timesteps).sample, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("resolution", [16, 4])  # of 4, the last level is a single pixel
@pytest.mark.parametrize("pattern", ["up_blocks*", "*norm*", "*.bias"])
def test_layers_behind_frozen_ones_get_the_gradients_that_they_have_among_trained_ones(pattern, resolution, channels_last):
    """The kernels for a CPU crash where a group norm's input has a certain layout and needs no gradient."""
    options = {"resolution": resolution, "image_channels": 1, "model_preset": "digits16", "channels_last": channels_last}
    images = torch.randn(2, 1, resolution, resolution, generator=torch.Generator().manual_seed(0)).double()
    gradients = []
    for train_only in (None, [pattern]):
        unet = make_unet(DDPMOptions(train_only=train_only, pretrained="p", **options)).double()
        unet(images, torch.tensor([3, 700])).sample.square().sum().backward()
        gradients.append({name: p.grad for name, p in unet.named_parameters() if p.grad is not None})
    whole, part = gradients
    assert 0 < len(part) < len(whole)
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    for name, gradient in part.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-8, atol=1e-11 * largest)
