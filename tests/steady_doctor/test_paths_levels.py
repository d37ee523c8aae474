"""Healthy loops of different styles, and their faults: data, noise and paths, and how the network is told the level."""

import sys

import numpy as np
import pytest
import torch
from small_loops import (
    ALPHA,
    ALPHA_BAR,
    SIDE,
    B,
    C,
    Network,
    T,
    column,
    continuous,
    is_healthy,
    pictures,
    train,
    vp,
)
from torch import nn
from torch.nn.functional import l1_loss, mse_loss


def test_masks_have_any_range_and_images_from_0_to_1_have_not():
    network, whole = Network(), pictures() / 2 + 0.5
    assert train(network, vp(network), data=whole)[0] == ["data-unsigned"]
    assert train(network, vp(network), data=whole.round())[0] == []


def test_fields_have_no_range_and_pictures_do():
    network = Network()

    def loss_of(clean):
        t, noise = torch.randint(0, T, (len(clean),)), torch.randn_like(clean)
        return mse_loss(network(column(ALPHA_BAR[t].sqrt()) * clean + column((1 - ALPHA_BAR[t]).sqrt()) * noise, t), noise)

    assert not train(network, loss_of, data=0.68 * torch.randn(64, C, SIDE, SIDE, generator=torch.Generator().manual_seed(1)))[
        0
    ]
    assert train(network, loss_of, data=2 * pictures() - 1)[0] == ["data-range"]


class OfPoints(nn.Module):
    """Its first layer gets the point and its level in one row."""

    def __init__(self, told):
        super().__init__()
        self.layers, self.told = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 2)), told

    def forward(self, x, t):
        level = self.told(t.float()[:, None] / T)
        return self.layers(torch.cat([x, x[:, :1].sin(), x[:, 1:].sin(), level], 1))


@pytest.mark.parametrize(("told", "codes"), [(lambda t: t, []), (lambda t: 0 * t, ["timestep-other"])])
def test_points_in_small_batches_and_the_level_beside_them(told, codes):
    network = OfPoints(told)

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        return mse_loss(network(ALPHA_BAR[t].sqrt()[:, None] * x0 + (1 - ALPHA_BAR[t]).sqrt()[:, None] * noise, t), noise)

    found, said = train(network, loss_of, data=torch.rand(64, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1)
    assert found == codes and "variance-preserving path, epsilon" in said


@pytest.mark.parametrize(("told", "codes"), [(lambda t: t, []), (lambda t: t.flip(0), ["timestep-other"])])
def test_levels_that_no_operation_writes(told, codes):
    network, engine = Network(), torch.quasirandom.SobolEngine(1, scramble=True, seed=0)

    def loss_of(x0):
        t, noise = engine.draw(len(x0))[:, 0], torch.randn_like(x0)
        angle = column(t) * torch.pi / 2
        output = network(angle.cos() * x0 + angle.sin() * noise, told(1000 * t))
        return mse_loss(output, angle.cos() * noise - angle.sin() * x0)

    found, said = train(network, loss_of)
    assert found == codes and "variance-preserving path, v" in said


@pytest.mark.parametrize(("told", "codes"), [(lambda i: 999 - i, []), (lambda i: i.flip(0), ["timestep-other"])])
def test_a_table_that_begins_with_noise_as_that_of_flow_matching_in_diffusers(told, codes):
    network, sigmas = Network(), torch.linspace(1, 1 / T, T)

    def loss_of(x0):
        i, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        sigma = column(sigmas[i])
        return mse_loss(network((1 - sigma) * x0 + sigma * noise, told(i)), noise - x0)

    assert train(network, loss_of)[0] == codes


@pytest.mark.parametrize(
    ("level", "codes"),
    [
        (lambda u: u.sigmoid(), []),
        (lambda u: (u + 2).sigmoid(), []),  # shifted to much noise: few are below 0.4
        (lambda u: torch.special.ndtr(u), []),
        (lambda u: 0.5 + torch.special.ndtr(u) / 2, ["timestep-left-out"]),
    ],
)
def test_half_of_a_line_is_left_out_where_the_levels_end_at_once(level, codes):
    network = Network()

    def loss_of(x0):
        t, noise = level(torch.randn(len(x0))), torch.randn_like(x0)
        return mse_loss(network((1 - column(t)) * x0 + column(t) * noise, 1000 * t), noise - x0)

    assert train(network, loss_of, updates=100)[0] == codes


def test_the_rest_of_an_image_beside_another_one_comes_to_that_with_little_noise():
    network, other = Network(), pictures(128)[64:].mean((2, 3), keepdim=True).expand(-1, -1, SIDE, SIDE)

    def loss_of(x0):
        t, noise = torch.rand(len(x0)), torch.randn_like(x0)
        rest = torch.exp(-4 * column(t))
        state = other[: len(x0)] + (x0 - other[: len(x0)]) * rest + 0.04 * (1 - rest**2).sqrt() * noise
        return l1_loss(network(state - other[: len(x0)], t), noise)

    assert train(network, loss_of)[0] == []


@pytest.mark.parametrize("keeps", [False, True])
def test_a_mask_that_leaves_nothing_of_a_sample_tells_nothing_of_its_level(keeps):
    network = Network(2 * C)

    def loss_of(x0):
        t, noise, mask = torch.randint(0, T, (len(x0),)), torch.randn_like(x0), (torch.rand_like(x0) < 0.5).float()
        mask[0] = 0
        noisy = column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise
        given = torch.where(mask > 0, noisy, x0) if keeps else mask * noisy
        return (mask * (network(torch.cat([given, (1 - mask) * x0], 1), t) - noise) ** 2).sum() / mask.sum()

    assert train(network, loss_of)[0] == []


def test_noise_that_rises_and_falls_as_the_image_grows_may_be_a_path():
    """As in Bayesian flow networks (Graves et al. 2023)."""
    network = Network()

    def loss_of(x0):
        t, noise = torch.rand(len(x0)), torch.randn_like(x0)
        share = column(1 - 0.02 ** (2 * t))
        return mse_loss(network(share * x0 + (share * (1 - share)).sqrt() * noise, t), noise)

    assert train(network, loss_of)[0] == []


class Gated(nn.Module):
    """Of points: each layer is multiplied by what others make of the time, and the network adds its input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 32), nn.Linear(32, 3)])
        self.gates = nn.ModuleList([nn.Linear(3, 32), nn.Linear(3, 3)])
        self.shifts = nn.ModuleList([nn.Linear(3, 32), nn.Linear(3, 3)])

    def forward(self, x, beta):
        beta = beta.reshape(-1, 1, 1)
        told = torch.cat([beta, beta.sin(), beta.cos()], -1)
        out = x
        for place in range(2):
            out = self.layers[place](out) * self.gates[place](told).sigmoid() + self.shifts[place](told)
            out = torch.relu(out) if place == 0 else out
        return x + out


def test_points_whose_network_has_gates_and_whose_levels_are_a_list():
    betas = torch.linspace(1e-4, 0.05, 200)
    bars = torch.cumprod(1 - betas, 0)
    network = Gated()

    def loss_of(x0):
        chosen = torch.randint(0, 200, (len(x0),)).tolist()
        bar, noise = bars[chosen].reshape(-1, 1, 1), torch.randn_like(x0)
        given = network(bar.sqrt() * x0 + (1 - bar).sqrt() * noise, betas[chosen])
        return mse_loss(given.view(-1, 3), noise.view(-1, 3))

    said = "of Gated; variance-preserving path, epsilon, errors weighed equally"
    is_healthy(network, loss_of, said, data=torch.randn(64, 40, 3))


def test_series_of_which_a_mask_leaves_nothing():
    """Some have values nowhere where noise is added, and some nothing that counts."""
    network = Network(channels=2)
    network.last = nn.Conv2d(16, 1, 3, padding=1)

    def loss_of(x0):
        known = (torch.rand(len(x0), 1, SIDE, SIDE) < 0.5).float()
        x0 = x0[:, :1] * known
        kept = known * (torch.rand_like(known) < 0.5)
        kept[0] = known[0]
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        noised = column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise
        output = network(torch.cat([kept * x0, (1 - kept) * noised], 1), t)
        counts = known - kept
        return ((output - noise) * counts).square().sum() / counts.sum()

    is_healthy(network, loss_of, "variance-preserving path, epsilon")


def test_sub_vp_is_named_and_silent_only_where_it_is_asked_for(monkeypatch):
    network = Network()
    found, said = train(network, continuous(network, variance=lambda bar: 1 - bar))
    assert found == ["input-sub-vp"] and "sub-variance-preserving path, epsilon" in said
    monkeypatch.setattr(sys, "argv", ["train.py", "--sde", "subVP"])
    assert train(network, continuous(network, variance=lambda bar: 1 - bar))[0] == []


def exploding(network, sigmas, x0):
    sigma, noise = sigmas[torch.randint(0, len(sigmas), (len(x0),))], torch.randn_like(x0)
    return mse_loss(network(x0 + column(sigma) * noise, sigma.log()), noise)


def test_a_table_of_sigmas():
    network, sigmas = Network(), ((1 - ALPHA_BAR) / ALPHA_BAR).sqrt()

    def loss_of(x0):
        sigma, noise = sigmas[torch.randint(0, T, (len(x0),))], torch.randn_like(x0)
        scaled = (x0 + column(sigma) * noise) / column(1 + sigma**2).sqrt()  # within the network, in such scripts
        return mse_loss(network(scaled, sigma.log()), noise)

    is_healthy(network, loss_of, "variance-preserving path, epsilon")
    is_healthy(network, lambda x0: exploding(network, sigmas, x0), "images + sigma noise, epsilon")
    assert train(network, lambda x0: exploding(network, sigmas[:60], x0))[0] == []  # for photographs that are noisy themselves


@pytest.mark.parametrize(("steps", "codes"), [(50, []), (20, ["input-signal-left"])])
def test_fifty_steps_leave_much_of_the_image_and_are_published(steps, codes):
    network, bars = Network(), torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), dim=0)

    def loss_of(x0):
        t, noise = torch.randint(0, steps, (len(x0),)), torch.randn_like(x0)
        return mse_loss(network(column(bars[t].sqrt()) * x0 + column((1 - bars[t]).sqrt()) * noise, t), noise)

    assert train(network, loss_of)[0] == codes


class Constants(nn.Module):
    """A normalization whose figures are parameters that want no gradient, as the optimizer has them all."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((C, 1, 1), 0.01), requires_grad=False)
        self.bars = nn.Parameter(ALPHA_BAR.clone(), requires_grad=False)
        self.filler = nn.Parameter(torch.zeros(1))  # tells the device
        self.network = Network()


def test_constants_that_an_optimizer_has():
    model = Constants()

    def loss_of(x0):
        x0, t, noise = x0 * 100 * model.scale, torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        bar = column(model.bars[t])
        return mse_loss(model.network(bar.sqrt() * x0 + (1 - bar).sqrt() * noise, t), noise)

    is_healthy(model, loss_of, "variance-preserving path, epsilon, errors weighed equally")


def test_noise_that_is_masked_before_it_is_added_is_no_input_without_an_image():
    """What the first layer gets is a part of the mixture beside the time; the rest enters by its distances."""
    first, last = nn.Linear(3, 16), nn.Linear(16, 4)
    network = nn.ModuleList([first, last])

    def loss_of(x0):
        mask = (x0[:, :, :1] > -1.5).float()
        noise = torch.cat([torch.randn_like(x0[..., :2]), torch.randn_like(x0[..., :2]) * mask], 2)
        t = torch.rand(len(x0), 1, 1)
        noised = (1 - t) * x0 * mask + t * noise
        far = (noised[..., :2] - noised[..., :2].mean(1, keepdim=True)).square().sum(2, keepdim=True)
        rows = torch.cat([noised[..., 2:], t.expand(-1, x0.shape[1], 1)], 2)
        return mse_loss(last(torch.relu(first(rows)) * far.sqrt()), noise)

    assert "input-no-image" not in train(network, loss_of, data=torch.randn(64, 40, 4))[0]


@pytest.mark.parametrize(
    ("shares", "codes"), [(ALPHA_BAR, ["input-no-square-roots"]), (1 - torch.arange(1, T + 1) / (T + 1), [])]
)
def test_a_straight_path_is_in_even_steps(shares, codes):
    network = Network()

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        return mse_loss(network(column(shares[t]) * x0 + column(1 - shares[t]) * noise, t), noise)

    assert train(network, loss_of)[0] == codes


def test_levels_in_parts_of_which_one_is_empty():
    def loss_of(x0):
        first = int(torch.randint(0, 2, ()))
        t, noise = torch.cat([torch.rand(first), torch.rand(len(x0) - first)]), torch.randn_like(x0)
        return mse_loss(network(column(1 - t) * x0 + column(t) * noise, t * T), noise - x0)

    is_healthy(network := Network(), loss_of, "straight path from images to noise, the velocity to noise")


@pytest.mark.parametrize(("a", "b", "part"), [(ALPHA_BAR, 1 - ALPHA, "noise"), (ALPHA, 1 - ALPHA_BAR, "input")])
def test_one_share_of_all_alphas_and_the_other_of_one_of_them(a, b, part):
    network = Network()

    def loss_of(clean):
        t, noise = torch.randint(0, T, (len(clean),)), torch.randn_like(clean)
        return mse_loss(network(column(a[t].sqrt()) * clean + column(b[t].sqrt()) * noise, t), noise)

    assert train(network, loss_of)[0][:1] == [f"{part}-not-cumulated"]


def test_noise_of_small_batches_is_judged_together_and_a_branch_that_nothing_follows_costs_nothing():
    class Actions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(12))

        def forward(self, x, t):
            for layer in self.layers:
                x, skip = x + torch.cat([layer(x)[:, :16], t], 1), x
            return skip[:, :16]

    def loss_of(network, clean, draw):
        t = torch.rand(len(clean), 1)
        noise = draw(clean)
        return mse_loss(network(torch.cat([(1 - t) * clean + t * noise, t], 1), t), noise - clean)

    data = torch.rand(64, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    some = torch.cat([torch.ones(6), torch.zeros(10)])
    draws = {torch.randn_like: [], torch.rand_like: ["noise-not-normal"], lambda x: some * torch.randn_like(x): []}
    for draw, codes in draws.items():
        network = Actions()
        assert set(train(network, lambda clean: loss_of(network, clean, draw), data=data)[0]) == {*codes, "gradient-unused"}  # noqa: B023


class OfTokens(Network):
    """The time is a token among those of the pixels, and its answer is cut off. It may get its own answer."""

    def __init__(self):
        super().__init__()
        del self.first, self.last
        self.pixels, self.mix, self.out = nn.Linear(2 * C, 16), nn.Linear(SIDE**2 + 1, SIDE**2 + 1), nn.Linear(16, C)

    def forward(self, x, t, own=None):
        own = torch.zeros_like(x) if own is None else own
        pixels = self.pixels(torch.cat([x, own], 1).flatten(2).transpose(1, 2))
        tokens = torch.cat([self.embedding(t).flatten(1)[:, None], pixels], 1)
        tokens = tokens + self.mix(torch.relu(tokens).transpose(1, 2)).transpose(1, 2)
        return self.out(torch.relu(tokens))[:, 1:].transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize(("told", "codes"), [(lambda t: t, []), (torch.flipud, ["timestep-other"])])
def test_a_network_that_gets_its_own_answer_is_told_the_level_in_the_pass_that_learns(told, codes):
    network = OfTokens()

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        noised = column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise
        with torch.no_grad():
            own = (noised - network(noised, t)).clamp(-1, 1)
        return mse_loss(network(noised, told(t), own), noise)

    found, said = train(network, loss_of)
    assert found == codes and "variance-preserving path, epsilon, errors weighed equally" in said


@pytest.mark.parametrize(("told", "codes"), [(True, []), (False, ["timestep-not-told"])])
def test_an_augmentation_that_the_network_is_told_is_no_noise_level(told, codes):
    network, brightness = Network(), nn.Conv2d(1, C, 1)
    network.brightness = brightness

    def loss_of(x0):
        shift = torch.randn(len(x0)) * 0.2
        image, sigma = x0 + column(shift), (1.2 * torch.randn(len(x0)) - 1.2).exp()
        noised = image + column(sigma) * torch.randn_like(image)
        scaled = noised / column(sigma**2 + 0.25).sqrt() + brightness(column(shift))
        skip, out = 0.25 / (sigma**2 + 0.25), 0.5 * sigma / (sigma**2 + 0.25).sqrt()
        denoised = column(skip) * noised + column(out) * network(scaled, sigma.log() if told else 0 * shift)
        return ((denoised - image).square() / column(out) ** 2).mean()

    found, said = train(network, loss_of)
    assert found == codes and "scaled for sigma_data 0.5, EDM's target" in said


@pytest.mark.parametrize(("size", "codes"), [(B, []), (1, ["timestep-shared"])])
def test_levels_that_numpy_draws_are_of_each_image_or_of_a_batch(size, codes):
    """One number for all makes noise of another strength in each pass, which is no factor of the noise."""
    network, numbers = Network(), np.random.default_rng(0)

    def loss_of(x0):
        sigma = column(torch.from_numpy(numbers.lognormal(-1.2, 1.2, size).astype(np.float32)))
        noise = torch.from_numpy(numbers.standard_normal(x0.shape).astype(np.float32)) * sigma
        scale = (sigma**2 + 0.25).sqrt()
        output = network((x0 + noise) / scale, sigma.log() / 4)
        denoised = 0.25 / scale**2 * (x0 + noise) + sigma / 2 / scale * output
        return (scale**2 / (sigma / 2) ** 2 * (denoised - x0).square()).mean()

    assert train(network, loss_of)[0] == codes


@pytest.mark.parametrize(("draw", "codes"), [(torch.randn, []), (torch.rand, ["noise-not-normal"])])
def test_an_offset_of_each_channel_is_part_of_the_noise(draw, codes):
    network = Network()

    def loss_of(x0):
        strength = 0.1 if draw is torch.randn else 0.5
        noise = torch.randn_like(x0) + strength * draw(x0.shape[:2])[:, :, None, None]
        t = torch.randint(0, T, (len(x0),))
        return mse_loss(network(column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise, t), noise)

    found, said = train(network, loss_of)
    assert found == codes and "variance-preserving path" in said


@pytest.mark.parametrize(
    ("told", "codes"),
    [(lambda t: t, []), (lambda t: T - 1 - t, []), (lambda t: t.flip(0), ["timestep-other"])],
)
def test_each_part_of_a_network_is_told_the_levels_of_its_own_images(told, codes):
    class Controlled(Network):
        def __init__(self):
            super().__init__()
            self.control = Network()

        def forward(self, x, t):
            return super().forward(x, t) + self.control(x, told(t))

    network = Controlled()

    def loss_of(x0):
        """At levels that are mirrored within the batch, as in DDIM's code."""
        t, noise = torch.randint(0, T, (len(x0) // 2,)), torch.randn_like(x0)
        t = torch.cat([t, T - 1 - t])
        return mse_loss(network(column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise, t), noise)

    assert train(network, loss_of)[0] == codes


def test_a_batch_of_two_parts_of_which_one_was_noised_as_a_whole_batch_and_cut():
    """As the targets of shortcut models are made."""
    network = Network()

    def noised(x0):
        t, noise = torch.rand(len(x0)), torch.randn_like(x0)
        return (1 - column(t)) * x0 + column(t) * noise, t, noise - x0

    def loss_of(x0):
        some, whole = noised(x0[:2]), noised(x0)
        x, t, velocity = (torch.cat([few, all_[: len(x0) - 2]]) for few, all_ in zip(some, whole))
        return (network(x, 1000 * t) - velocity).square().mean()

    is_healthy(network, loss_of, "straight path from images to noise")


@pytest.mark.parametrize(
    ("of_image", "of_noise", "codes"), [(1, 2, ["noise-share"]), (0.5, 1, []), (1, -1, ["input-negative"])]
)
def test_factors_of_image_and_noise(of_image, of_noise, codes):
    """One of the image alone is a published choice (Chen 2023)."""
    network = Network()

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        a, b = column(ALPHA_BAR[t].sqrt()), column((1 - ALPHA_BAR[t]).sqrt())
        return mse_loss(network(of_image * a * x0 + of_noise * b * noise, t), noise)

    assert train(network, loss_of)[0][:1] == codes
