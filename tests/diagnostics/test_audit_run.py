"""What the step audit sees over many updates, and of the EDM2 network: healthy ones, and a change to each."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from models import edm2_unet
from models.edm2_unet import EDM2UNet
from utils.diagnostics.audit.averages import check_averages
from utils.diagnostics.audit.built import check_config
from utils.diagnostics.audit.continuity import Continuity
from utils.diagnostics.audit.declared import Declared, DeclaredNoising, DeclaredOptimizer
from utils.diagnostics.audit.edm2_network import check_edm2_network
from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.optimizer import check_memory
from utils.diagnostics.audit.pooled import Pool
from utils.diagnostics.audit.seen import Step, Update

STEPS, BATCH, DECAY = 1000, 16, 0.9
DECLARED = Declared(
    DeclaredNoising("linear", STEPS, False, "epsilon", None),
    None,
    DeclaredOptimizer("adamw", 0.9, 0.999, 1e-8, 0.0, 0.9, lambda step: 1e-3, 1.0),
    1,
    None,
)


def wrong(checks):
    return [(check.stage, check.message) for check in checks if check.healthy is False]


# ---- the averages and weights of every update


def followed(spoil=None, skipped=(), late=False):
    """The checks after 30 updates; `spoil` gets (number of the update, weights, average) after each; `late`: still in it."""
    weights = {name: torch.nn.Parameter(torch.randn(4, 4)) for name in "abc"}
    average = {name: p.detach().clone() for name, p in weights.items()}
    continuity = Continuity(weights, {"EMA": average}, {"EMA": lambda number: DECAY})
    for number in range(1, 31):
        continuity.begin()
        made = number not in skipped
        with torch.no_grad():
            for p in weights.values() if made else ():
                p += 0.1 * torch.randn(p.shape)
            continuity.stepped()
            for name, p in weights.items() if made else ():
                average[name].lerp_(p, 1 - DECAY)
        if spoil and late:
            spoil(number, weights, average)
        continuity.end(number, torch.tensor(made))
        if spoil and not late:
            spoil(number, weights, average)
    return continuity.checks()


def test_weights_and_averages_are_followed_through_every_update():
    assert [check.stage for check in followed()] == ["state", "ema"]
    assert not wrong(followed(skipped=(3, 4, 17)))

    def reset(number, weights, average):
        if number == 12:
            average["b"].copy_(weights["b"].detach())

    def set_back(number, weights, average):
        if number == 12:
            weights["b"].data *= 1.01

    [(stage, text)] = wrong(followed(reset))
    assert stage == "ema" and "30 updates" in text
    for late in (False, True):
        [(stage, text)] = wrong(followed(set_back, late=late))
        assert stage == "state" and "after 1 of 30 updates" in text


def test_an_average_that_was_never_made_is_named():
    declared = replace(DECLARED, averages={"EMA": lambda number: DECAY})
    [(stage, text)] = wrong(check_averages(Update(3), declared, Observer({"network": torch.nn.Linear(2, 2)})))
    assert stage == "ema" and "no such average" in text


def test_an_optimizer_that_lost_its_count_is_named():
    counted = torch.tensor([7.0, 7.0, 0.0])
    step = Step(*[torch.zeros(3)] * 3, {"step": torch.tensor([17.0, 17.0, 3.0])}, [], torch.zeros(3), "AdamW")
    assert not wrong(check_memory(step, counted, 10))
    [(stage, text)] = wrong(check_memory(step, counted, 11))
    assert stage == "optimizer" and "11 updates were made" in text
    for kept in ({}, {"step": torch.tensor([4.0, 4.0, 0.0])}):
        [(_, text)] = wrong(check_memory(replace(step, state_before=kept), counted, 10))
        assert "lost its state" in text
    assert not check_memory(replace(step, state_before={}), torch.zeros(3), 10)  # of one that counts nothing


# ---- what is drawn

TIMESTEPS = {
    "each by itself": lambda g: torch.randint(STEPS, (BATCH,), generator=g),
    "first and the last": lambda g: torch.cat([t := torch.randint(STEPS, (BATCH // 2,), generator=g), STEPS - 1 - t.flip(0)]),
    "neighbors": lambda g: torch.randint(STEPS, (BATCH,), generator=g).sort().values,
    "means of batches": lambda g: (torch.arange(BATCH) * STEPS / BATCH + torch.rand(BATCH, generator=g) * STEPS / BATCH)[
        torch.randperm(BATCH, generator=g)
    ].long(),
}


@pytest.mark.parametrize("how", TIMESTEPS)
def test_noise_levels_that_depend_on_each_other_are_named(how):
    pool, generator = Pool(DECLARED), torch.Generator().manual_seed(3)
    for _ in range(100):
        pool.add_levels(TIMESTEPS[how](generator))
    assert not wrong(pool.checks())  # their distribution is uniform
    found = wrong(pool.independence())
    assert (not found) if how == "each by itself" else (found[0][0] == "timestep" and "not drawn independently" in found[0][1])


def noise_checks(change):
    pool, generator, before = Pool(DECLARED), torch.Generator().manual_seed(4), None
    for _ in range(8):
        images = torch.rand(BATCH, 3, 8, 8, generator=generator) * 2 - 1
        noise = torch.randn(images.shape, generator=generator)
        noise, before = change(noise, images, before), noise
        pool.add_noise(noise, images)
    return wrong(pool.checks())


def test_noise_that_is_rearranged_or_depends_on_the_image_is_named():
    assert not noise_checks(lambda noise, images, before: noise)
    for number in range(3):
        change = (torch.neg, lambda x: x.flip(1), lambda x: x.roll(1, -1))[number]
        [(stage, text)] = noise_checks(lambda noise, images, before, change=change: noise if before is None else change(before))
        assert stage == "noise" and "that an earlier image had" in text
    [(_, text)] = noise_checks(lambda noise, images, before: 0.95 * noise + 0.55 * images)
    assert "depends on the image" in text
    sizes = torch.where(torch.arange(BATCH) % 2 == 0, 0.9, 1.19**0.5)[:, None, None, None]
    [(_, text)] = noise_checks(lambda noise, images, before: noise * sizes)
    assert "from image to image" in text
    [(_, text)] = noise_checks(lambda noise, images, before: noise / noise.std((1, 2, 3), keepdim=True))
    assert "from image to image" in text
    [(_, text)] = noise_checks(lambda noise, images, before: noise - noise.mean((1, 2, 3), keepdim=True))
    assert "the pixels of an image share it" in text


# ---- the EDM2 network


@pytest.mark.parametrize(("classes", "sides"), [(0, 8), (5, [8, 12])])
def test_the_edm2_network_is_that_of_its_paper(classes, sides, monkeypatch):
    sizes = {"channel_multipliers": (1, 2), "layers_per_block": 1, "attention_resolutions": (4,), "attention_head_dim": 8}
    network = EDM2UNet(sides, 3, 3, classes, model_channels=8, dropout=0.1, **sizes).train()
    network.encoder[1].eval()
    state = torch.get_rng_state()
    [check] = check_edm2_network(network)
    assert check.healthy
    assert torch.equal(state, torch.get_rng_state())
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
            [(stage, text)] = wrong(check_edm2_network(network))
        assert stage == "network" and text.startswith(part), text


def test_a_network_that_is_not_the_one_of_its_config_is_named(tmp_path):
    network = EDM2UNet(8, 3, 3, model_channels=8, channel_multipliers=(1, 2), layers_per_block=1)
    network.save_config(tmp_path)
    flags = {"in_channels": 3, "dropout": None}
    assert [check.healthy for check in check_config(network, tmp_path, flags)] == [True]
    assert not check_config(network, tmp_path / "none.json", flags)
    [(stage, text)] = wrong(check_config(network, tmp_path / "config.json", flags | {"dropout": 0.1}))
    assert stage == "network" and "dropout 0.0, not the declared 0.1" in text
    other = EDM2UNet(8, 3, 3, model_channels=8, channel_multipliers=(1, 2), layers_per_block=2)
    [(_, text)] = wrong(check_config(other, tmp_path, flags))
    assert "layers_per_block 2, not the declared 1" in text
