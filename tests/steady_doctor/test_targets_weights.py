"""Healthy loops of different styles, and their faults: what the network is asked for, and how errors are weighed."""

import pytest
import torch
from small_loops import ALPHA_BAR, LEAST, MOST, SIDE, B, C, Network, T, column, continuous, is_healthy, pictures, train, vp
from torch import nn
from torch.nn.functional import l1_loss, mse_loss


def test_errors_count_more_in_the_mean_over_the_last_batch_of_an_epoch():
    network, said = Network(), "variance-preserving path, epsilon, errors weighed equally"
    is_healthy(network, vp(network), said, data=pictures(20))  # 8, 8 and 4


class OfPoints(nn.Module):
    """Waves of the level beside the point."""

    def __init__(self, numbers):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(16))
        self.layers = nn.Sequential(nn.Linear(numbers + 32, 32), nn.SiLU(), nn.Linear(32, numbers))

    def forward(self, x, level):
        waves = level[:, None] * self.frequencies
        return self.layers(torch.cat([x, waves.sin(), waves.cos()], 1))


@pytest.mark.parametrize(("spread", "codes"), [(0.5, []), (8.0, ["data-not-scaled"])])
def test_points_in_the_plane_with_scales_of_edm_are_judged_whatever_the_batch(spread, codes):
    network = OfPoints(2)

    def loss_of(points):
        x0, sigma = points.reshape(-1, 2), torch.randn(8 * B).sub(1.2).exp()
        total = (sigma**2 + 0.25).sqrt()[:, None]
        noisy = x0 + torch.randn_like(x0) * sigma[:, None]
        denoised = 0.25 / total**2 * noisy + sigma[:, None] * 0.5 / total * network(noisy / total, sigma.log() / 4)
        return ((total / sigma[:, None] / 0.5) ** 2 * (denoised - x0) ** 2).mean()

    points = torch.randn(64, 8, 2, generator=torch.Generator().manual_seed(2)) * spread
    found, said = train(network, loss_of, data=points)
    assert found == codes and "scaled for sigma_data 0.5, EDM's target" in said


def test_the_weights_of_the_likelihood():
    network = Network()
    loss_of = continuous(network, lambda t, bar: (LEAST + t * (MOST - LEAST)) / (1 - bar))
    is_healthy(network, loss_of, "epsilon, errors weighed as in the likelihood")
    # They are not to be had from another path's rates.
    found, said = train(network, continuous(network, lambda t, bar: (LEAST + t * (MOST - LEAST)) / (1 - bar) ** 2))
    assert found == ["weight-form"] and "errors weighed unequally" in said


@pytest.mark.parametrize(("power", "codes"), [(2, []), (0, []), (-2, ["weight-form"])])
def test_the_weights_of_a_score(power, codes):
    network = Network()

    def loss_of(x0):
        t = torch.rand(len(x0)) * (1 - 1e-3) + 1e-3
        bar = column(torch.exp(-0.5 * t**2 * (MOST - LEAST) - t * LEAST))
        sigma, noise = (1 - bar).sqrt(), torch.randn_like(x0)
        return (sigma**power * (network(bar.sqrt() * x0 + sigma * noise, 999 * t) + noise / sigma).square()).mean()

    found, said = train(network, loss_of)
    assert found == codes and "the score" in said


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_edms_target_asked_of_the_network_within(scale):
    network = Network()

    def loss_of(x0):
        sigma, noise = (torch.randn(len(x0)) * 1.2 - 1.2).exp(), torch.randn_like(x0)
        noised, total = x0 + column(sigma) * noise, column(sigma**2 + scale**2)
        output = network(noised / total.sqrt(), sigma.log() / 4)
        return mse_loss(output, (x0 - scale**2 / total * noised) / (column(sigma) * scale / total.sqrt()))

    is_healthy(network, loss_of, "EDM's target, errors weighed equally")


def test_what_another_network_sees_in_the_output_has_no_weights():
    network, eye = Network(), nn.Conv2d(C, 4, 3, 2).requires_grad_(False)

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        output = network(column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise, t)
        return (eye(output) - eye(x0)).square().mean()

    found, said = train(network, loss_of, rate=1e-4)
    assert found == [] and "weighed" not in said


@pytest.mark.parametrize("loss", [l1_loss, mse_loss, lambda output, noise: (output - noise).square().mean()])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_joins_each_sample_with_all_others(loss):
    network = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 1, 3, padding=1))

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        noised = ALPHA_BAR[t].sqrt()[:, None] * x0 + (1 - ALPHA_BAR[t]).sqrt()[:, None] * noise
        return loss(network(noised[:, None]), noise)  # [B, 1, L] and [B, L]

    assert "weight-square" in train(network, loss_of, data=torch.randn(64, 256))[0]


@pytest.mark.parametrize(
    ("asked", "dtype", "codes", "words"),
    [
        (torch.sub, torch.float32, [], "the velocity to noise"),
        (torch.sub, torch.bfloat16, [], ""),  # places that are rounded, too, are not known
        (torch.add, torch.float32, ["target-path"], ""),
    ],
)
def test_what_is_asked_for_may_be_cut_into_patches(asked, dtype, codes, words):
    network = nn.ModuleList([nn.Linear(4 * C, 32), nn.Linear(32, 32), nn.Linear(32, 4 * C)])

    def patches(x):
        return x.reshape(len(x), C, SIDE // 2, 2, SIDE // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(len(x), -1, 4 * C)

    def loss_of(x0):
        t, noise = torch.rand(len(x0)), torch.randn_like(x0)
        tokens = network[0](patches(column(1 - t) * x0 + column(t) * noise))
        output = network[2](torch.relu(network[1](torch.cos(t[:, None, None] * 9 + torch.arange(32))) + tokens))
        seen = (torch.rand(output.shape[:2]) < 0.5).float()
        return ((output - patches(asked(noise, x0)).to(dtype)).square().mean(-1) * seen).sum() / seen.sum()

    found, said = train(network, loss_of)
    assert found == codes and words in said


def test_an_output_with_three_heads_ends_nothing():
    network = Network(out=3 * C)

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        a, b = column(ALPHA_BAR[t].sqrt()), column((1 - ALPHA_BAR[t]).sqrt())
        heads = network(a * x0 + b * noise, t).split(C, 1)
        return sum(mse_loss(head, wanted) for head, wanted in zip(heads, (noise, x0, a * noise - b * x0)))

    assert train(network, loss_of)[0] == []


def test_signals_that_a_loader_gives_as_rows():
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def loss_of(x0):
        noise = torch.randn_like(x0)
        return mse_loss(network(0.6 * x0 + 0.8 * noise), noise)

    train(network, loss_of, updates=30, data=torch.randn(32, 64))  # it fails where the doctor stops


@pytest.mark.parametrize("strength", [0.0, 0.05])
@pytest.mark.parametrize("noised", [True, False])
def test_images_with_the_traces_of_an_encoder_are_clean(noised, strength):
    network = Network()

    def loss_of(images):
        latents = images + strength * torch.randn_like(images) if strength else images
        t, noise = torch.randint(0, T, (len(latents),)), torch.randn_like(latents)
        noisy = column(ALPHA_BAR[t].sqrt()) * latents + column((1 - ALPHA_BAR[t]).sqrt()) * noise
        return mse_loss(network(noisy if noised else latents, t), noise)

    assert train(network, loss_of)[0][:1] == ([] if noised else ["input-clean"])


def test_a_noisy_image_may_be_asked_for():
    """The pairs of Noise2Noise."""
    network = Network()

    def loss_of(images):
        noisy = images + 0.1 * torch.randn_like(images)
        return mse_loss(network(noisy, torch.zeros(len(images))), images + 0.1 * torch.randn_like(images))

    assert "input-clean" not in train(network, loss_of)[0]


@pytest.mark.parametrize("of_edges", [lambda x, y: (x - y).diff(dim=-1), lambda x, y: x.diff(dim=-1) - y.diff(dim=-1)])
@pytest.mark.parametrize(("asked", "codes"), [(lambda noise: noise, []), (lambda noise: noise.flip(0), ["target-other"])])
def test_an_error_may_count_in_its_neighbors_too(asked, codes, of_edges):
    def with_edges(output, noise):
        return mse_loss(output, asked(noise)) + 0.1 * of_edges(output, asked(noise)).square().mean()

    found, said = train(network := Network(), vp(network, with_edges))
    assert found == codes and ("variance-preserving path, epsilon" in said) == (not codes)


def test_a_condition_that_the_network_adds_to_its_last_layer_is_of_the_network():
    """As that which is to be enlarged, or weights of which the next ones are asked."""

    class Residual(Network):
        def forward(self, x, t, condition):
            return super().forward(torch.cat([x, condition], 1), t) + condition

    network = Residual(2 * C)

    def loss_of(x0):
        small = torch.nn.functional.interpolate(torch.nn.functional.avg_pool2d(x0, 2), scale_factor=2)
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        x = column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise
        return (network(x, t, small) - x0).square().mean()

    is_healthy(network, loss_of, "variance-preserving path, the image")
