import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import TINY_NETWORK
from diffusers import (
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    UNet2DModel,
)
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from models.edm_heun import EDMHeunScheduler
from utils.core import randomness
from utils.core.errors import UserError
from utils.core.images import denoising_path, is_complete_png, make_grid, save_png, side_by_side
from utils.diffusion.sampling import SamplePlan, full_precision, make_sampler, path_steps, sample, set_timesteps, to_uint8

SHAPE, PATH = (1, 8, 8), (999, 500, 0)
# Other kernels (for another batch size, number of threads or place in memory) round otherwise, by some 1e-6 in each prediction.
# The start of a chain enlarges that by up to 1 / sqrt(abar) = 100; what it adds up to stays far below a gray level, 8e-3.
CHAIN = 1e-3


def tiny_unet(seed: int = 0, **changes) -> UNet2DModel:
    torch.manual_seed(seed)
    return UNet2DModel(**TINY_NETWORK | {"sample_size": 8, "dropout": 0.1} | changes)


def run_sample(unet, scheduler, n=5, steps=10, batch_size=8, numbers=None, **kwargs):
    numbers = torch.arange(n) if numbers is None else torch.tensor(numbers)
    with full_precision(unet):
        return sample(unet, SamplePlan(scheduler, steps, SHAPE, 3, batch_size, "cpu"), numbers, **kwargs)


SCHEDULES = {
    "epsilon": {},
    "sample": {"prediction_type": "sample", "beta_schedule": "squaredcos_cap_v2"},
    "zero snr": {
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
    },
}


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_the_pipelines_of_diffusers(sampler, schedule, monkeypatch):
    unet, noise_scheduler = tiny_unet().eval(), DDPMScheduler(**SCHEDULES[schedule])
    images = run_sample(unet, make_sampler(sampler, noise_scheduler))

    pipeline = {"ddim": DDIMPipeline, "ddpm": DDPMPipeline}[sampler](unet, noise_scheduler)
    pipeline.set_progress_bar_config(disable=True)
    noise = randomness.normal(3, "sample", torch.arange(5), SHAPE)
    monkeypatch.setattr(sys.modules[type(pipeline).__module__], "randn_tensor", lambda *args, **kwargs: noise.clone())
    draws = (randomness.normal(3, f"sampling noise/{k}", torch.arange(5), SHAPE) for k in range(10))
    monkeypatch.setattr(sys.modules[DDPMScheduler.__module__], "randn_tensor", lambda *args, **kwargs: next(draws))
    expected = pipeline(batch_size=5, num_inference_steps=10, output_type="np").images
    expected = torch.from_numpy(expected).permute(0, 3, 1, 2) * 2 - 1
    torch.testing.assert_close(images, expected, rtol=0, atol=CHAIN)
    assert images.std() > 0.1  # not all black, which any loop would equal


@pytest.mark.parametrize("sampler", ["ddim", "ddpm", "dpmsolver++"])
def test_an_image_depends_on_its_number_alone(sampler):
    unet, scheduler = tiny_unet(), make_sampler(sampler, DDPMScheduler())
    images = run_sample(unet, scheduler, n=7)
    for batch_size in (1, 3):
        torch.testing.assert_close(run_sample(unet, scheduler, n=7, batch_size=batch_size), images, rtol=0, atol=CHAIN)
    torch.testing.assert_close(run_sample(unet, scheduler, numbers=[5, 2]), images[[5, 2]], rtol=0, atol=CHAIN)
    assert (images[0] - images[1]).abs().max() > 0.1


class CopiesToDevice(TorchDispatchMode):
    """Counts the copies from the CPU to the `meta` device, which has no values: reading one would raise."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[-1] if function is torch.ops.aten.copy_.default else args[0]
            self.count += source.device.type == "cpu" and result.device.type == "meta"
        return result


@pytest.mark.parametrize("name", ["ddim", "ddpm", "dpmsolver++", "heun"])
def test_a_step_copies_nothing_to_the_device(name):
    """Neither timesteps nor noise: each copy makes the host wait for the device."""
    scheduler = make_sampler(name, EDMHeunScheduler() if name == "heun" else DDPMScheduler())
    unet, copies = tiny_unet().eval().to("meta"), []
    for steps in (2, 5):
        with CopiesToDevice() as log:
            images = sample(unet, SamplePlan(scheduler, steps, SHAPE, 0, 3, "meta"), torch.arange(3))
        assert images.shape == (3, *SHAPE)
        copies.append(log.count)
    assert copies == [2, 2]  # the image numbers and the timesteps, once


def test_leaves_weights_modes_and_global_random_states_alone():
    unet = tiny_unet().train()
    unet.conv_in.eval()  # a frozen part stays frozen
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    images = run_sample(unet, make_sampler("ddpm", DDPMScheduler()))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all() and random.getstate() == python_state
    assert all(torch.equal(value, before[name]) for name, value in unet.state_dict().items())
    assert unet.training and not unet.conv_in.training and unet.conv_out.training
    assert torch.equal(images, run_sample(unet, make_sampler("ddpm", DDPMScheduler())))  # dropout was off
    assert unet(torch.zeros(1, *SHAPE), 0).sample.requires_grad


@pytest.fixture
def bf16_accelerator():
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


def test_full_precision_under_autocast(bf16_accelerator):
    plain = tiny_unet().eval()
    x, t = torch.randn(2, *SHAPE), torch.tensor([10, 500])
    with torch.no_grad():
        expected = plain(x, t).sample
    model = bf16_accelerator.prepare(tiny_unet())
    training_output = model.eval()(x, t).sample
    assert (training_output - expected).abs().max() > 1e-3  # autocast is on before ...
    model.train()
    with pytest.raises(KeyboardInterrupt), full_precision(model), bf16_accelerator.autocast():
        raise KeyboardInterrupt
    with bf16_accelerator.autocast(), full_precision(model) as unet:
        torch.testing.assert_close(unet(x, t).sample, expected, rtol=1e-4, atol=1e-5)  # bf16 is 1e-2 off
    assert model.training
    assert torch.equal(model.eval()(x, t).sample, training_output)  # ... and after
    assert hasattr(model, "_original_forward")


@pytest.mark.slow
def test_full_precision_runs_compiled_modules_eagerly_unless_asked():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    unet, x = tiny_unet().eval(), torch.randn(2, *SHAPE)
    with torch.no_grad():
        expected = unet(x, 5).sample
    unet.compile(backend=backend)
    unet.mid_block.compile(backend=backend)
    with full_precision(unet):
        torch.testing.assert_close(unet(x, 5).sample, expected, rtol=1e-4, atol=1e-5)
    assert not graphs
    with full_precision(unet, compiled=True):
        unet(x, 5)
    assert graphs
    torch._dynamo.reset()


def test_full_precision_refuses_wrappers():
    with (
        pytest.raises(TypeError, match="unwrapped model, got OptimizedModule"),
        full_precision(torch.compile(tiny_unet())),
    ):
        pass


@pytest.mark.parametrize("name", ["ddim", "ddpm", "dpmsolver++"])
@pytest.mark.parametrize("beta_schedule", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_samplers_keep_the_training_schedule(name, beta_schedule, zero_snr, tmp_path):
    training = DDPMScheduler(
        num_train_timesteps=100,
        beta_schedule=beta_schedule,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=zero_snr,
    )
    sampler = make_sampler(name, training)
    torch.testing.assert_close(sampler.betas, training.betas)
    assert sampler.config.prediction_type == "v_prediction"
    spacing = "trailing" if zero_snr else "linspace" if name == "dpmsolver++" else "leading"
    assert sampler.config.timestep_spacing == spacing
    training.save_pretrained(tmp_path)
    again = make_sampler(name, DDPMScheduler.from_pretrained(tmp_path).config)  # as generate.py does, from the export
    set_timesteps(sampler, 7)
    set_timesteps(again, 7)
    assert torch.equal(sampler.timesteps, again.timesteps)
    assert (sampler.timesteps[0] == 99) == (spacing != "leading")
    images = run_sample(tiny_unet(), again, n=2, steps=7)
    assert images.isfinite().all() and images.abs().max() <= 1


def test_a_perfect_network_gives_its_image_back():
    """The noise prediction that belongs to one known image leads every sampler to that image."""
    noise_scheduler = DDPMScheduler(prediction_type="sample")
    target = torch.linspace(-0.9, 0.9, 64).reshape(1, *SHAPE)

    class Oracle(torch.nn.Module):
        def forward(self, images, timestep):
            return type("Output", (), {"sample": target.expand_as(images)})

    for name in ("ddim", "ddpm", "dpmsolver++"):
        plan = SamplePlan(make_sampler(name, noise_scheduler), 50, SHAPE, 0, 2, "cpu")
        images = sample(Oracle(), plan, torch.arange(3))
        torch.testing.assert_close(images, target.expand(3, *SHAPE), rtol=0, atol=1e-3)


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_sample": False},
        {"clip_sample_range": 0.5},
        {"clip_sample_range": 2.0},
        {"thresholding": True, "sample_max_value": 1.5, "dynamic_thresholding_ratio": 0.9},
        {"thresholding": True, "clip_sample": False},
    ],
)
def test_samplers_keep_the_clipping(settings, prediction_type):
    """All make the same denoised image of the same prediction: diffusers' DDIM, whose step tells it, is the measure."""
    training = DDPMScheduler(prediction_type=prediction_type, timestep_spacing="trailing", **settings)
    prediction, x = torch.randn(2, 3, *SHAPE, generator=torch.Generator().manual_seed(0))
    measure = DDIMScheduler(prediction_type=prediction_type, timestep_spacing="trailing", **settings)
    measure.set_timesteps(20)
    timestep = measure.timesteps[4]
    expected = measure.step(prediction, timestep, x).pred_original_sample
    for name in ("ddim", "ddpm", "dpmsolver++"):
        sampler = make_sampler(name, make_sampler(name, training))  # a sampler's own config may be what is at hand
        set_timesteps(sampler, 20)
        assert sampler.timesteps[4] == timestep
        if name == "dpmsolver++":
            sampler._init_step_index(timestep)
            found = sampler.convert_model_output(prediction, sample=x)
        else:
            found = sampler.step(prediction, timestep, x, generator=torch.Generator()).pred_original_sample
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("missing", ["clip_sample", "clip_sample_range"])
def test_samplers_agree_where_a_pipeline_says_nothing_of_clipping(missing):
    full = dict(DDPMScheduler().config)
    config = {key: value for key, value in full.items() if key not in (missing, "_use_default_values")}
    for name in ("ddim", "ddpm", "dpmsolver++"):
        images, expected = (run_sample(tiny_unet(), make_sampler(name, c), n=4) for c in (config, full))
        assert torch.equal(images, expected)


@pytest.mark.parametrize("relative", ["dpmsolver", "sde-dpmsolver++"])
def test_dpmsolver_is_dpmsolver_whichever_relative_made_a_pipeline(relative):
    config = dict(DDPMScheduler().config)
    images, expected = (
        run_sample(tiny_unet(), make_sampler("dpmsolver++", c), n=4) for c in (config | {"algorithm_type": relative}, config)
    )
    assert torch.equal(images, expected)


def test_unknown_schedules_are_named():
    with pytest.raises(UserError, match="unknown beta_schedule 'own'"):
        make_sampler("ddim", dict(DDPMScheduler().config) | {"beta_schedule": "own"})


def test_denoising_path_is_what_the_network_saw():
    unet, seen = tiny_unet(), {}
    unet.register_forward_pre_hook(lambda module, args: seen.__setitem__(int(args[1]), args[0].clone()))
    wanted = (999, 740, 500, 0)
    scheduler = make_sampler("ddim", DDPMScheduler())
    images, path = run_sample(unet, scheduler, steps=10, record_timesteps=wanted)
    assert path.shape == (5, 4, *SHAPE)
    for column, timestep in enumerate((900, 700, 500)):
        assert torch.equal(path[:, column], seen[timestep].clamp(-1, 1))
    assert [timestep for _, timestep in path_steps(scheduler, wanted)] == [900, 700, 500, 0]
    assert torch.equal(path[:, 3], images)
    assert torch.equal(images, run_sample(unet, scheduler, steps=10))


def test_should_stop_ends_sampling_between_steps():
    unet, calls = tiny_unet(), []
    unet.register_forward_pre_hook(lambda module, args: calls.append(1))
    assert run_sample(unet, make_sampler("ddim", DDPMScheduler()), should_stop=lambda: len(calls) == 3) is None
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("name", "steps", "spacing", "message"),
    [
        ("ddim", 0, "leading", "from 1 to 1000"),
        ("ddim", 1001, "leading", "from 1 to 1000"),
        ("ddim", 61, "trailing", "example 50"),
        ("ddim", 600, "leading", "cannot spread 600 sampling steps evenly over 1000\nset another number, for example 500"),
        ("ddpm", 400, "leading", "example 250"),
        ("dpmsolver++", 1000, "leading", "example 500"),
    ],
)
def test_impossible_step_counts_are_refused(name, steps, spacing, message):
    with pytest.raises(UserError, match=message):
        set_timesteps(make_sampler(name, DDPMScheduler(timestep_spacing=spacing)), steps)


@pytest.mark.parametrize("name", ["ddim", "ddpm", "dpmsolver++"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_every_chain_starts_in_the_noise(name, spacing):
    """A chain of 20 steps or more that starts below t = 900 would treat pure noise as a half-finished image."""
    scheduler = make_sampler(name, DDPMScheduler(timestep_spacing=spacing))
    for steps in (20, 50, 100, 250, 500, 999):
        set_timesteps(scheduler, steps)
        assert scheduler.timesteps[0] >= 900, steps


def test_unknown_sampler():
    with pytest.raises(UserError, match=r"--sampler euler does not work .*\nchoose from ddim, ddpm, dpmsolver"):
        make_sampler("euler", DDPMScheduler())


@pytest.mark.slow
def test_two_processes_sample_the_same_images(server, tmp_path):
    server.run(["tests/launch/sharded_sampling.py", tmp_path], 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {
        name: run_sample(tiny_unet(), make_sampler("ddpm", DDPMScheduler()), n, 4, batch_size, record_timesteps=PATH)
        for name, n, batch_size in [("even", 4, 2), ("short last chunk", 3, 2), ("fewer chunks than processes", 1, 1)]
    }
    torch.set_num_threads(threads)
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt")
        assert results.pop("one process stops") is None
        assert results.keys() == expected.keys()
        for name, made in expected.items():
            assert all(map(torch.equal, results[name], made)), name


def test_to_uint8_rounds_as_diffusers_does():
    levels = torch.arange(256)
    assert torch.equal(to_uint8(levels / 127.5 - 1), levels.to(torch.uint8))
    values = torch.rand(1, 1, 50, 100, generator=torch.Generator().manual_seed(0)) * 2.4 - 1.2
    unit = (values / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(to_uint8(values)[0, 0].numpy(), np.array(DDPMPipeline.numpy_to_pil(unit)[0]))
    assert to_uint8(torch.tensor([float("nan"), float("inf")])).tolist() == [0, 255]


def test_grids_hold_every_image_where_it_belongs():
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    grid = np.array(make_grid(images, columns=3, padding=2))
    assert grid.shape == (2 * 66 + 2, 3 * 66 + 2, 3)  # 8 pixels enlarged eight times
    tile = grid[2 + 66 : 2 + 66 + 64, 2 + 66 : 2 + 66 + 64]  # second row, second column
    assert np.array_equal(tile[4::8, 4::8], images[4].permute(1, 2, 0).numpy())
    assert (grid[2 + 66 :, 2 + 2 * 66 :] == 208).all()  # there is no sixth image
    assert np.array_equal(tile[:8, :8], np.broadcast_to(tile[0, 0], (8, 8, 3)))
    gray = np.array(make_grid(images[:1, :1].repeat(1, 1, 12, 12)))  # 96 pixels stay 96
    assert gray.shape == (100, 100, 3) and np.array_equal(gray[2:98, 2:98, 0], images[0, 0].repeat(12, 12).numpy())


def test_captioned_grids():
    images = torch.zeros(4, 1, 16, 16, dtype=torch.uint8)
    both = np.array(side_by_side(images, images + 200))
    assert (both[18 + 2 : 18 + 66, 2:66] == 0).all() and (both[18 + 2 : 18 + 66, -66:-2] == 200).all()
    assert (both[:18] < 128).any(axis=(0, 2)).nonzero()[0].tolist() != []  # there is ink in the caption line
    path = torch.arange(6, dtype=torch.uint8).mul(20).reshape(2, 3, 1, 1, 1).expand(2, 3, 1, 16, 16)
    page = np.array(denoising_path(path, ("t=999", "t=500", "t=0")))
    assert [page[18 + 30 + 66 * row, 30 + 66 * column, 0] for row in range(2) for column in range(3)] == [
        *(0, 20, 40, 60, 80, 100)
    ]


def test_png_files_are_complete_or_absent(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    path = tmp_path / "new folder" / "a.png"
    save_png(Image.fromarray(pixels), path)
    assert np.array_equal(np.array(Image.open(path)), pixels) and os.listdir(path.parent) == ["a.png"]
    assert is_complete_png(path, (30, 40)) and not is_complete_png(path, (40, 30))
    content = path.read_bytes()

    def half(self, file, format):
        Path(file).write_bytes(content[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr(Image.Image, "save", half)
    with pytest.raises(OSError, match="No space"):
        save_png(Image.fromarray(pixels), path)
    assert path.read_bytes() == content
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    cut = [content[:-count] for count in (1, 4, 8, 12, 13, 20, len(content) // 2)]
    for broken in (*cut, bytes(flipped), b"", b"hello"):
        path.write_bytes(broken)
        assert not is_complete_png(path, (30, 40))
    assert not is_complete_png(tmp_path / "absent.png", (30, 40))
