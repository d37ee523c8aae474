"""Networks as they were asked for, and samplers with a network that knows the answer: those of training arrive."""

from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from test_edm2_unet import tiny
from torch.nn.functional import silu

import train_edm2
from models import edm2_unet
from models.edm2_unet import EDM2UNet
from models.edm_heun import EDMHeunScheduler
from steady_doctor.built.equations import equations
from steady_doctor.built.network import Built, built, config
from steady_doctor.built.sampler import Process, sampler
from steady_doctor.words import finding
from utils.diffusion.ddpm import make_noise_scheduler
from utils.diffusion.sampling import NoiseOfSamples, make_sampler
from utils.diffusion.unet import make_unet
from utils.options.flags import DDPMOptions
from utils.training.audit import sampler_call

SHAPE, PLAIN = (3, 8, 8), Built(None, "default", False, False)
SMALL = {"model_channels": 8, "channel_multipliers": (1, 2), "layers_per_block": 1}
CODES = ("levels", "start", "end", "steps", "noise", "clipping")
LEVELS, START, END, STEPS, NOISE, CLIPPING = (f"export-sampler-{what}" for what in CODES)


def codes(found) -> list[str]:
    return [finding(one).code for one in found]  # each sentence has its figures


KINDS = PLAIN, Built("gelu", "xavier", True, False), Built("mish", "he", False, True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_that_is_built_as_asked_passes_and_all_others_are_found(kind):
    network = make_unet(DDPMOptions(resolution=16, image_channels=1, model_preset="digits16", seed=0, **asdict(kind)))
    for asked in KINDS:
        found = list(built(network, asked, True, 0))
        assert ("network-first-weights" in codes(found)) == (asked != kind)
        differs = {"spectral norm": asked.spectral_norm != kind.spectral_norm}
        differs |= {"last layer": asked.zero_init_output != kind.zero_init_output}
        differs |= {"activation": asked.activation not in (None, kind.activation)}
        assert {one.figures["what"] for one in found if one.code == "network-built"} == {k for k in differs if differs[k]}
    assert "network-first-weights" not in codes(built(network, PLAIN, False, 9))
    torch._foreach_mul_([parameter.data for parameter in network.parameters()], 1.2)
    assert codes(built(network, kind, True, 0)) == ["network-first-weights"]


def test_a_network_that_is_not_the_one_of_its_config_is_found(tmp_path):
    network = EDM2UNet(8, 3, 3, **SMALL)
    network.save_config(tmp_path)
    asked, other = {"in_channels": 3, "dropout": None}, EDM2UNet(8, 3, 3, **(SMALL | {"layers_per_block": 2}))
    assert codes(config(network, tmp_path, asked, 0)) == codes(config(other, tmp_path / "none.json", asked, 0)) == []
    for wrong, more, what in ((network, {"dropout": 0.1}, "dropout"), (other, {}, "layers_per_block")):
        [found] = config(wrong, tmp_path / "config.json", asked | more, 0)
        assert (found.code, found.figures["what"]) == ("network-built", what)


@pytest.mark.parametrize(("classes", "sides"), [(0, 8), (5, [8, 12])])
def test_the_edm2_network_is_that_of_its_paper(classes, sides, monkeypatch):
    network = EDM2UNet(sides, 3, 3, classes, **SMALL, attention_resolutions=(4,), attention_head_dim=8, dropout=0.1).train()
    network.encoder[1].eval()
    state = torch.get_rng_state()
    assert codes(equations(network, 1)) == [] and torch.equal(state, torch.get_rng_state())
    assert network.training and not network.encoder[1].training and not network.encoder[1].conv_in.training
    changes = {
        "encoder.0": (edm2_unet, "mp_silu", silu),
        "encoder.1": (network.encoder[1], "mode", "decoder"),
        "decoder.3": (edm2_unet, "mp_cat", lambda a, b, t: torch.cat([a, b], 1)),
        "noise_features": (network.noise_features, "forward", lambda x: torch.zeros(len(x), 8)),
    }
    for part, change in changes.items():
        with monkeypatch.context() as changed:
            changed.setattr(*change)
            [found] = equations(network, 1)
        assert (codes([found]), found.figures["part"]) == (["network-equations"], part)


def of_training(name, scheduler, steps):
    return sampler_call(SimpleNamespace(noise_scheduler=scheduler, predict=None, exported=None), name, steps)


def asked(call, scheduler, adds_noise=False) -> str:
    """The one code that is found, or none. The table is diffusers' own, of the same names."""
    names = ("num_train_timesteps", "beta_schedule", "rescale_betas_zero_snr")
    table = DDPMScheduler(**{name: scheduler.config[name] for name in names}).alphas_cumprod.double()
    process = Process(table, scheduler.config.prediction_type)
    return "".join(codes(sampler(call, process, SHAPE, 1, adds_noise=adds_noise, clips=True)))


def asked_edm(call, sigma_data=0.5, shape=SHAPE) -> str:
    return "".join(codes(sampler(call, Process(sigma_data=sigma_data), shape, 1)))


@pytest.mark.parametrize("name", ["ddim", "ddpm", "dpmsolver++"])
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"])
def test_the_samplers_of_training_arrive(name, schedule):
    for kind, zero in product(("epsilon", "sample", "v_prediction"), (False, True)):
        named = {"beta_schedule": schedule, "prediction_type": kind, "rescale_betas_zero_snr": zero}
        for timesteps, steps in () if zero and kind == "epsilon" else ((1000, 10), (10, 5)):
            scheduler = make_noise_scheduler(**named, num_train_timesteps=timesteps)
            assert asked(of_training(name, scheduler, steps), scheduler, name == "ddpm") == ""


def test_the_samplers_of_edm_arrive():
    for name, steps in product(("heun", "dpmsolver++"), (2, 3, 18, 32)):
        assert asked_edm(of_training(name, EDMHeunScheduler(sigma_data=0.3), steps), 0.3) == ""
    recipe = train_edm2.EDM2(tiny(), train_edm2.parse_args(["--dataset_name", "digits", "--sigma_data", "0.4"]))
    for sigma_data, code in ((0.4, ""), (0.5, END)):  # by its own `predict`
        assert asked_edm(sampler_call(recipe, "heun", 18), sigma_data, (1, 8, 8)) == code


AS_IT_IS = {"told": lambda t: t, "answer": lambda output: output, "images": lambda x: x, "same": False, "noise": 1.0}


def loop(scheduler, steps=10, **changes):
    """A sampler loop as a user may write it, with something wrong in it."""
    wrong = SimpleNamespace(**(AS_IT_IS | {"start": None, "scale": None} | changes))

    def call(oracle, count):
        generator = torch.Generator().manual_seed(0)
        scheduler.set_timesteps(steps)
        start = float(scheduler.init_noise_sigma) if wrong.start is None else wrong.start
        x = start * torch.randn(count, *SHAPE, generator=generator)
        x = x[:1].expand(count, -1, -1, -1) if wrong.same else x
        for t in scheduler.timesteps:
            scaled = x if wrong.scale else scheduler.scale_model_input(x, t)
            with NoiseOfSamples(lambda shape=x.shape: wrong.noise * torch.randn(shape, generator=generator)):
                x = scheduler.step(wrong.answer(oracle(scaled, wrong.told(t)).sample), t, x).prev_sample
        return wrong.images(x)

    return call


def test_a_loop_of_edm_that_does_something_else_is_found():
    for settings, change, code in [
        *(({}, {}, ""), ({}, {"start": 1.0}, START), ({}, {"scale": True}, START), ({}, {"answer": torch.neg}, END)),
        ({}, {"told": lambda t: (4 * t).exp()}, LEVELS),  # sigma instead of ln(sigma) / 4
        *(({"sigma_max": 20.0}, {"start": 80.0}, START), ({"sigma_data": 0.4}, {}, END)),
    ]:
        assert asked_edm(loop(EDMHeunScheduler(**{"sigma_data": 0.5} | settings), 18, **change)) == code


def test_another_config_is_found():
    trained, others = make_noise_scheduler(), [{"prediction_type": kind} for kind in ("sample", "v_prediction")]
    others += [{"beta_schedule": "squaredcos_cap_v2"}, {"beta_end": 0.03}, {"clip_sample_range": 0.5}]
    for name, change in product(("ddim", "dpmsolver++"), others):
        assert asked(loop(make_sampler(name, {**trained.config, **change})), trained) in (END, STEPS)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("", [{}]),
        (LEVELS, [{"told": lambda t: 999 - t}, {"told": lambda t: t * 1000}, {"told": lambda t: t / 1000 + float("nan")}]),
        (START, [{"start": 2.0}, {"start": 0.0}, {"same": True}]),
        (END, [{"told": lambda t: t + 1}, {"answer": torch.neg}, {"answer": lambda output: 0.9 * output}]),
        (END, [{"images": lambda x: x / 2 + 0.5}, {"images": torch.neg}, {"images": lambda x: x * float("nan")}]),
        (STEPS, [{"told": lambda t: (t - 1).clamp(min=0)}, {"noise": 0.0}, {"noise": 1.4}]),
        (NOISE, [{"noise": 0.95}]),
    ],
)
def test_a_loop_that_does_something_else_is_found(code, changes):
    trained = make_noise_scheduler()
    for change in changes:
        name = "ddpm" if "noise" in change else "ddim"
        assert asked(loop(make_sampler(name, trained), **change), trained, name == "ddpm") == code
    assert code or asked(loop(make_sampler("ddpm", trained)), trained, True) == ""


def test_a_sampler_that_does_not_clip_or_starts_late_is_found():
    trained = make_noise_scheduler()
    plain = [kind.from_config(trained.config, clip_sample=False) for kind in (DDIMScheduler, DDPMScheduler)]
    plain.append(DPMSolverMultistepScheduler.from_config(trained.config, timestep_spacing="linspace"))
    for scheduler in plain:
        assert asked(loop(scheduler), trained, isinstance(scheduler, DDPMScheduler)) == CLIPPING
    trained = make_noise_scheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    assert asked(loop(DDIMScheduler.from_config(trained.config, timestep_spacing="leading")), trained) == LEVELS
    assert asked(lambda oracle, count: torch.zeros(count, *SHAPE), trained) == ""  # who asks nobody is not judged
