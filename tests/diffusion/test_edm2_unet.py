"""The magnitude-preserving layers and the EDM2 U-Net, against what the paper promises of them."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from models.edm2_unet import (
    PRESETS,
    EDM2Block,
    EDM2UNet,
    MPConv2d,
    MPFourier,
    MPLinear,
    force_weight_norm,
    mp_cat,
    mp_silu,
    mp_sum,
    normalize,
)

TINY = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "num_class_embeds": 3, "model_channels": 8}
TINY |= {"channel_multipliers": (1, 2), "layers_per_block": 1, "attention_resolutions": (4,), "attention_head_dim": 8}


def tiny(**changes) -> EDM2UNet:
    torch.manual_seed(0)
    unet = EDM2UNet(**TINY | changes)
    with torch.no_grad():  # a fresh network's output is 0, and its blocks do not see the embedding
        for name, parameter in unet.named_parameters():
            if name.endswith("gain"):
                parameter.fill_(0.5)
    return unet


def magnitude(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


class Inside(nn.Module):
    """What `layer` gives where its kernel sees no padding. With the border, where zeros stand for neighbors, it is 0.958."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[..., 1:-1, 1:-1]


LAYERS = {
    "convolution 3x3": (lambda: Inside(MPConv2d(64, 64, 3)), lambda: (torch.randn(4, 64, 16, 16),)),
    "convolution 1x1": (lambda: MPConv2d(32, 96, 1), lambda: (torch.randn(4, 32, 16, 16),)),
    "linear": (lambda: MPLinear(128, 256), lambda: (torch.randn(64, 128),)),
    "fourier features": (lambda: MPFourier(256), lambda: (torch.randn(64),)),
    "silu": (lambda: mp_silu, lambda: (torch.randn(64, 64),)),
    "sum": (lambda: mp_sum, lambda: (torch.randn(64, 64), torch.randn(64, 64), 0.3)),
    "concatenation": (lambda: mp_cat, lambda: (torch.randn(64, 32), torch.randn(64, 96), 0.3)),
    "pixel norm": (lambda: normalize, lambda: (torch.randn(4, 64, 16, 16) * 3, 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_keep_unit_magnitude(name):
    magnitudes = []
    for seed in range(50):
        torch.manual_seed(seed)
        layer, arguments = LAYERS[name]
        with torch.no_grad():
            magnitudes.append(magnitude(layer()(*arguments())))
    assert sum(magnitudes) / 50 == pytest.approx(1.0, abs=0.01)
    assert all(abs(value - 1.0) < 0.05 for value in magnitudes)


def test_concatenation_weighs_by_t_and_not_by_channels():
    a, b = torch.randn(64, 16), torch.randn(64, 1600)
    joined = mp_cat(a, b, 0.5)
    assert joined[:, :16].square().sum() / joined[:, 16:].square().sum() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("mode", "resample", "heads"), [("encoder", "keep", 2), ("decoder", "keep", 2), ("decoder", "up", 0)])
def test_fresh_blocks_keep_unit_magnitude(mode, resample, heads):
    for seed in range(5):
        torch.manual_seed(seed)
        block = EDM2Block(64, 128, 64, mode=mode, resample=resample, num_heads=heads)
        with torch.no_grad():
            assert 0.8 < magnitude(block(torch.randn(4, 64, 16, 16), torch.randn(4, 64))) < 1.2


def test_cosine_attention_against_a_plain_computation():
    torch.manual_seed(0)
    block = EDM2Block(8, 8, 4, mode="decoder", num_heads=2)
    qkv = torch.randn(2, 24, 3, 5)
    actual = block._attend(qkv)
    for sample in range(2):
        for head in range(2):
            q, k, v = (qkv[sample].flatten(1)[part * 8 + head * 4 : part * 8 + head * 4 + 4] for part in range(3))
            q, k, v = (F.normalize(x, dim=0) * 2.0 for x in (q, k, v))  # 4 channels of unit magnitude
            weights = torch.softmax(q.T @ k / math.sqrt(4), dim=1)
            expected = (weights @ v.T).T.reshape(4, 3, 5)
            torch.testing.assert_close(actual[sample, head * 4 : head * 4 + 4], expected, rtol=1e-3, atol=1e-3)


def test_weights_act_by_direction_alone_and_forcing_their_norm_changes_no_output():
    unet = tiny().eval()
    arguments = torch.randn(4, 1, 8, 8), torch.randn(4), torch.tensor([0, 1, 2, -1])
    with torch.no_grad():
        for module in unet.modules():
            if isinstance(module, (MPConv2d, MPLinear)):
                module.weight *= 3.0
        before = unet(*arguments).sample
        force_weight_norm(unet)
        torch.testing.assert_close(unet(*arguments).sample, before, rtol=1e-3, atol=1e-3)
    for module in unet.modules():
        if isinstance(module, (MPConv2d, MPLinear)):
            rms = module.weight.flatten(1).square().mean(1).sqrt()
            torch.testing.assert_close(rms, torch.ones_like(rms), rtol=1e-5, atol=1e-5)
    module = unet.conv_in
    unet(*arguments).sample.sum().backward()
    inner = (module.weight * module.weight.grad).flatten(1).sum(1)  # no gradient along the vector
    assert inner.abs().max() < 1e-3 * module.weight.grad.norm() * module.weight.norm()


def test_a_skipped_update_leaves_the_weights_bit_for_bit():
    unet = tiny()
    before = copy.deepcopy(unet.state_dict())
    force_weight_norm(unet, torch.tensor(False))
    assert all(torch.equal(before[name], value) for name, value in unet.state_dict().items())


class OnDevice(torch.Tensor):
    """A flag that the host must not read, as one on a GPU."""

    device = torch.device("cuda")
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __bool__(self):
        raise AssertionError("the host waits for the device")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sample_size", [8, (8, 2), 2])
def test_attention_gets_what_fused_kernels_take(monkeypatch, memory_format, sample_size):
    """On a device without values, as on a GPU. A kernel for a CPU, which asks the same of the last stride, judges."""
    attention, seen = F.scaled_dot_product_attention, []

    def spy(*qkv: torch.Tensor) -> torch.Tensor:
        seen.append(qkv)
        return attention(*qkv)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    with torch.device("meta"):
        unet = EDM2UNet(**TINY | {"sample_size": sample_size}).to(memory_format=memory_format)
        unet(torch.randn(2, 1, *((sample_size,) * 2 if isinstance(sample_size, int) else sample_size)), torch.zeros(2))
    assert len(seen) == sum(isinstance(module, EDM2Block) and module.num_heads > 0 for module in unet.modules()) > 0
    for qkv in seen:
        assert [part.stride(-1) for part in qkv] == [1, 1, 1]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # which raises where it refuses
            attention(*(torch.empty_strided(part.shape, part.stride()).zero_() for part in qkv))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("finite", [None, True, False])
def test_forced_weights_against_the_formula(memory_format, finite):
    unet = tiny().to(memory_format=memory_format)
    with torch.no_grad():
        for module in unet.modules():
            if isinstance(module, (MPConv2d, MPLinear)):
                module.weight *= 10 ** torch.randn(len(module.weight)).view(-1, *[1] * (module.weight.ndim - 1))
    before = copy.deepcopy(unet.state_dict())
    force_weight_norm(unet, finite if finite is None else torch.tensor(finite).as_subclass(OnDevice))
    forced = {f"{n}.weight" for n, module in unet.named_modules() if isinstance(module, (MPConv2d, MPLinear))}
    for name, weight in unet.state_dict().items():
        assert weight.stride() == before[name].stride()
        if finite is False or name not in forced:
            assert torch.equal(weight, before[name]), name
        else:
            rows = before[name].flatten(1).double()
            expected = (rows / rows.square().mean(1, keepdim=True).sqrt()).view(weight.shape).float()
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=0.0)


def test_forced_weights_take_few_launches():
    """Operations that compute something, on a network without values. Seven for each weight would be 1,127."""

    class Operations(TorchDispatchMode):
        computing = 0

        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            result = operation(*arguments, **(options or {}))
            self.computing += not operation.is_view
            return result

    with torch.device("meta"):
        unet, finite = EDM2UNet(num_class_embeds=1000, **PRESETS["XS"]), torch.tensor(True)
    weights = sum(isinstance(module, (MPConv2d, MPLinear)) for module in unet.modules())
    with Operations() as operations:
        force_weight_norm(unet, finite)
    assert weights == 161 and operations.computing < weights + 20


def test_classes_and_noise_level_are_seen_and_minus_one_is_no_class():
    unet = tiny().eval()
    x, level = torch.randn(1, 1, 8, 8).expand(4, -1, -1, -1), torch.zeros(4)
    with torch.no_grad():
        out = unet(x, level, torch.tensor([0, 1, -1, -1])).sample
        torch.testing.assert_close(out[2], out[3], rtol=1e-4, atol=1e-5)  # a kernel's blocks of rows may be unequal
        assert min((out[i] - out[j]).abs().max() for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-3
        torch.testing.assert_close(unet(x, 0.0).sample[0], out[2], rtol=1e-4, atol=1e-5)
        assert (unet(x, level + 1.0).sample[0] - out[2]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "millions"),
    [("XXS", None), ("XS", 124.7), ("S", 280.2), ("M", 497.8), ("L", 777.5), ("XL", 1119.3), ("XXL", 1523.2)],
)
def test_parameters_of_the_paper_s_sizes(name, millions):
    with torch.device("meta"):
        unet = EDM2UNet(num_class_embeds=1000, **PRESETS[name])
    count = sum(p.numel() for p in unet.parameters()) / 1e6
    assert millions is None or count == pytest.approx(millions, rel=1e-3)


def test_saved_and_loaded_as_safetensors(tmp_path):
    unet = tiny().eval()
    unet.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    loaded = EDM2UNet.from_pretrained(tmp_path)
    assert list(loaded.config.channel_multipliers) == list(unet.config.channel_multipliers)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in unet.state_dict().items())
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():  # the loaded weights lie elsewhere in memory, where kernels may round otherwise
        torch.testing.assert_close(loaded(x, 0.3).sample, unet(x, 0.3).sample, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        unet = tiny()
        if checkpointing:
            unet.enable_gradient_checkpointing()
            calls = []
            run = unet._gradient_checkpointing_func
            unet._gradient_checkpointing_func = lambda *a, run=run, calls=calls: calls.append(a) or run(*a)
        torch.manual_seed(1)
        unet(torch.randn(2, 1, 8, 8), torch.randn(2)).sample.square().sum().backward()
        gradients.append({name: p.grad for name, p in unet.named_parameters() if p.grad is not None})
    assert len(calls) == len(unet.encoder) + len(unet.decoder)
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    unet = tiny()
    arguments = torch.randn(2, 1, 8, 8), torch.randn(2), torch.tensor([1, -1])
    compiled = torch.compile(unet, fullgraph=True, backend="eager")  # raises at the first break
    torch.testing.assert_close(compiled(*arguments).sample, unet(*arguments).sample, rtol=1e-4, atol=1e-5)
    explanation = torch._dynamo.explain(unet)(*arguments)
    assert explanation.graph_count == 1 and explanation.graph_break_count == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_and_does_not_overflow(dtype):
    unet = tiny().eval()
    x, level = torch.randn(4, 1, 8, 8), torch.randn(4)
    with torch.no_grad():
        expected = unet(x, level).sample
        with torch.autocast("cpu", dtype):
            autocast = unet(x, level).sample
        half = copy.deepcopy(unet).to(dtype)
        for actual in (autocast, half(x.to(dtype), level).sample):
            assert actual.dtype == dtype
            # bf16 rounds by up to 2^-9, some hundred times one after another: 0.02 if they are independent.
            assert (actual.float() - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_activations_are_clipped(dtype):
    """A decoder block has no norm of its own. Without the clip a chain of them leaves the range of fp16."""
    torch.manual_seed(0)
    block = EDM2Block(8, 8, 4, mode="decoder").to(dtype)
    with torch.no_grad():
        out = block(1000.0 * torch.randn(2, 8, 8, 8, dtype=dtype), torch.randn(2, 4, dtype=dtype))
    assert out.max() == 256.0 and out.min() == -256.0


def test_a_zero_vector_has_a_gradient():
    x = torch.randn(2, 4, 3, 3)
    x[0, :, 1, 1] = 0.0
    x.requires_grad_()
    normalize(x, dim=1).square().sum().backward()
    assert x.grad.isfinite().all()
    conv = MPConv2d(4, 4, 3)
    conv.weight.data[1] = 0.0
    conv(x.detach()).sum().backward()
    assert conv.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_level_keeps_its_precision_in_a_cast_network(dtype, tmp_path):
    """The angle is 2 pi f c_noise: what rounding takes from f shifts it by percents of a turn."""
    unet, level = tiny(model_channels=64), torch.linspace(-1.5, 1.1, 50)
    expected = unet.noise_features(level)
    unet.save_pretrained(tmp_path)
    loaded = EDM2UNet.from_pretrained(tmp_path, torch_dtype=dtype)
    assert loaded.conv_in.weight.dtype == dtype
    for cast in (loaded, copy.deepcopy(unet).to(dtype), copy.deepcopy(unet).to("cpu", dtype)):
        assert torch.equal(cast.noise_features(level), expected)
    assert tiny().to("meta").noise_features.phases.is_meta
