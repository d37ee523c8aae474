"""What the step audit sees over many updates, and of what is drawn: healthy ones, and a change to each."""

from dataclasses import replace

import pytest
import torch

from utils.diagnostics.audit.averages import check_averages
from utils.diagnostics.audit.continuity import Continuity
from utils.diagnostics.audit.declared import Declared, DeclaredNoising, DeclaredOptimizer
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


# ---- what is drawn anew in each pass


def test_dropout_that_repeats_is_named():
    pool, generator = Pool(DECLARED), torch.Generator().manual_seed(0)
    for _ in range(3):
        torch.rand(1, generator=generator)
        pool.add_passes([generator.get_state()])
    assert [check.healthy for check in pool.checks()] == [True]
    pool.add_passes([generator.get_state(), None])
    assert [check.message for check in pool.checks()] == [
        "dropout leaves out the same activations in several passes: 3 different ones in 4 passes"
    ]


def levels_are(levels: torch.Tensor, steps: int):
    pool = Pool(replace(DECLARED, noising=replace(DECLARED.noising, steps=steps)))
    pool.add_levels(levels)
    (check,) = pool.checks()
    return check


@pytest.mark.parametrize("count", [64, 640, 6400])
def test_noise_levels_that_repeat_are_named(count):
    for steps in (2, 10, 1000):
        drawn = torch.randint(steps, (count,), generator=torch.Generator().manual_seed(count))
        assert levels_are(drawn, steps).healthy
    repeated = levels_are(drawn[:64].repeat(count // 64), 1000)
    assert repeated.healthy == (count == 64) and ("noise levels repeat" in repeated.message) == (count > 64)
