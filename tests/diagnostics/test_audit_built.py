"""The audit of how a network is built, over the flags that decide it, and of what is drawn anew in each pass."""

from dataclasses import replace

import pytest
import torch

from utils.diagnostics.audit.built import DeclaredNetwork, check_built
from utils.diagnostics.audit.declared import Declared, DeclaredNoising, DeclaredOptimizer
from utils.diagnostics.audit.pooled import Pool
from utils.diffusion.unet import make_unet
from utils.options.flags import DDPMOptions

PLAIN = DeclaredNetwork(None, "default", False, False)
ADAM = DeclaredOptimizer("adam", 0.9, 0.999, 1e-8, 0.0, 0.0, lambda step: 1e-3, 1.0)
DECLARED = Declared(DeclaredNoising("linear", 1000, False, "epsilon", None), None, ADAM, 1, None)


def built(declared: DeclaredNetwork, seed: int = 0):
    names = ("activation", "initialisation", "zero_init_output", "spectral_norm")
    flags = {name: getattr(declared, name) for name in names}
    return make_unet(DDPMOptions(resolution=16, image_channels=1, model_preset="digits16", seed=seed, **flags))


KINDS = {
    "plain": PLAIN,
    "gelu, xavier, zero": replace(PLAIN, activation="gelu", initialisation="xavier", zero_init_output=True),
    "mish, he, spectral norm": replace(PLAIN, activation="mish", initialisation="he", spectral_norm=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_that_is_built_as_declared_passes_and_all_others_are_named(kind):
    network = built(KINDS[kind])
    for declared in KINDS.values():
        wrong = {check.name for check in check_built(network, declared, fresh=True) if not check.healthy}
        if declared is KINDS[kind]:
            assert wrong == set()
        else:
            assert "first weights" in wrong
            assert ("spectral norm" in wrong) == (declared.spectral_norm != KINDS[kind].spectral_norm)
            assert ("activation" in wrong) == (declared.activation is not None)
    assert "first weights" not in {check.name for check in check_built(network, PLAIN, fresh=False)}


@pytest.mark.parametrize("scale", [0.5, 1.2, 3.0])
def test_first_weights_of_another_size_are_named(scale):
    network = built(PLAIN)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(scale)
    (check,) = [check for check in check_built(network, PLAIN, fresh=True) if not check.healthy]
    assert check.name == "first weights" and "times that of its kind" in check.message


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
