"""Healthy loops of different styles: what the doctor says that they train, and that it finds nothing; and their faults."""

import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import l1_loss, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from steady_doctor.described import described
from steady_doctor.doctor import Doctor

B, C, SIDE, T = 8, 3, 8, 1000
ALPHA = 1 - torch.linspace(1e-4, 0.02, T)
ALPHA_BAR = torch.cumprod(ALPHA, dim=0)
LEAST, MOST = 0.1, 20.0  # the rates of the continuous path


class Network(nn.Module):
    def __init__(self, channels=C, out=C):
        super().__init__()
        self.first, self.last = nn.Conv2d(channels, 16, 3, padding=1), nn.Conv2d(16, out, 3, padding=1)
        self.time = nn.Linear(32, 16)

    def embedding(self, t):
        waves = t.float().reshape(-1, 1) * torch.exp(-torch.arange(16) / 2)
        return self.time(torch.cat([waves.sin(), waves.cos()], 1))[:, :, None, None]

    def forward(self, x, t):
        return self.last(torch.relu(self.first(x) + self.embedding(t)))


def column(values):
    return values.reshape(-1, 1, 1, 1)


def pictures(count=64):
    return torch.rand(count, C, SIDE, SIDE, generator=torch.Generator().manual_seed(1)) * 2 - 1


def train(network, loss_of, updates=14, data=None, rate=1e-3, after=lambda: None):
    """Returns the codes of all findings, and what is said of the script. `loss_of`: of a batch."""
    torch.manual_seed(0)
    doctor = Doctor()
    with doctor.install():
        optimizer = torch.optim.Adam(network.parameters(), rate)
        loader, step = DataLoader(TensorDataset(pictures() if data is None else data), B, shuffle=True), 0
        while step < updates:
            for (batch,) in loader:
                optimizer.zero_grad()
                loss_of(batch).backward()
                optimizer.step()
                after()
                step += 1
    assert doctor.session.failure is None
    found = [one.code for one in doctor.findings()]
    said = described(doctor.seen)
    assert said.startswith(f"{step} updates of ")
    return found, said


def is_healthy(network, loss_of, words, **more):
    """Nothing is found in a training, and `words` are said of it."""
    found, said = train(network, loss_of, **more)
    assert found == [] and words in said


def vp(network, loss=mse_loss):
    """Epsilon on the variance-preserving path."""

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        return loss(network(column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise, t), noise)

    return loss_of


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


@pytest.mark.parametrize(("blurs", "codes"), [(True, []), (False, ["gradient-missing"])])
def test_a_fixed_blur_that_the_network_undoes_needs_no_gradient_and_a_first_layer_does(blurs, codes):
    class Blurred(Network):
        def __init__(self):
            super().__init__(C if blurs else 4)
            self.blur = nn.Conv2d(C, C if blurs else 4, 3, padding=1)

    network = Blurred()

    def loss_of(x0):
        with torch.no_grad():
            given = network.blur(network.blur(x0)) if blurs else network.blur(x0)
        return mse_loss(network(given, torch.zeros(len(x0))), x0)

    assert train(network, loss_of)[0] == codes


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


def continuous(network, weight=lambda t, bar: 1.0, variance=lambda bar: (1 - bar).sqrt()):
    """Epsilon at a time that is drawn evenly from 1e-3 to 1, on the path with linear rates."""

    def loss_of(x0):
        t = torch.rand(len(x0)) * (1 - 1e-3) + 1e-3
        bar = torch.exp(-0.5 * t**2 * (MOST - LEAST) - t * LEAST)
        noise = torch.randn_like(x0)
        output = network(column(bar.sqrt()) * x0 + column(variance(bar)) * noise, 999 * t)
        return ((output - noise).square().mean((1, 2, 3)) * weight(t, bar)).mean()

    return loss_of


def test_the_weights_of_the_likelihood():
    network = Network()
    loss_of = continuous(network, lambda t, bar: (LEAST + t * (MOST - LEAST)) / (1 - bar))
    is_healthy(network, loss_of, "epsilon, errors weighed as in the likelihood")
    # They are not to be had from another path's rates.
    found, said = train(network, continuous(network, lambda t, bar: (LEAST + t * (MOST - LEAST)) / (1 - bar) ** 2))
    assert found == ["weight-form"] and "errors weighed unequally" in said


def test_sub_vp_is_named_and_silent_only_where_it_is_asked_for(monkeypatch):
    network = Network()
    found, said = train(network, continuous(network, variance=lambda bar: 1 - bar))
    assert found == ["input-sub-vp"] and "sub-variance-preserving path, epsilon" in said
    monkeypatch.setattr(sys, "argv", ["train.py", "--sde", "subVP"])
    assert train(network, continuous(network, variance=lambda bar: 1 - bar))[0] == []


def test_a_table_of_sigmas():
    network, sigmas = Network(), ((1 - ALPHA_BAR) / ALPHA_BAR).sqrt()

    def loss_of(x0):
        sigma, noise = sigmas[torch.randint(0, T, (len(x0),))], torch.randn_like(x0)
        scaled = (x0 + column(sigma) * noise) / column(1 + sigma**2).sqrt()  # within the network, in such scripts
        return mse_loss(network(scaled, sigma.log()), noise)

    is_healthy(network, loss_of, "variance-preserving path, epsilon")
    is_healthy(network, lambda x0: exploding(network, sigmas, x0), "images + sigma noise, epsilon")
    assert train(network, lambda x0: exploding(network, sigmas[:60], x0))[0] == []  # for photographs that are noisy themselves


def test_masks_have_any_range_and_images_from_0_to_1_have_not():
    network, whole = Network(), pictures() / 2 + 0.5
    assert train(network, vp(network), data=whole)[0] == ["data-unsigned"]
    assert train(network, vp(network), data=whole.round())[0] == []


@pytest.mark.parametrize(("steps", "codes"), [(50, []), (20, ["input-signal-left"])])
def test_fifty_steps_leave_much_of_the_image_and_are_published(steps, codes):
    network, bars = Network(), torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), dim=0)

    def loss_of(x0):
        t, noise = torch.randint(0, steps, (len(x0),)), torch.randn_like(x0)
        return mse_loss(network(column(bars[t].sqrt()) * x0 + column((1 - bars[t]).sqrt()) * noise, t), noise)

    assert train(network, loss_of)[0] == codes


def exploding(network, sigmas, x0):
    sigma, noise = sigmas[torch.randint(0, len(sigmas), (len(x0),))], torch.randn_like(x0)
    return mse_loss(network(x0 + column(sigma) * noise, sigma.log()), noise)


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_edms_target_asked_of_the_network_within(scale):
    network = Network()

    def loss_of(x0):
        sigma, noise = (torch.randn(len(x0)) * 1.2 - 1.2).exp(), torch.randn_like(x0)
        noised, total = x0 + column(sigma) * noise, column(sigma**2 + scale**2)
        output = network(noised / total.sqrt(), sigma.log() / 4)
        return mse_loss(output, (x0 - scale**2 / total * noised) / (column(sigma) * scale / total.sqrt()))

    is_healthy(network, loss_of, "EDM's target, errors weighed equally")


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


def test_what_another_network_sees_in_the_output_has_no_weights():
    network, eye = Network(), nn.Conv2d(C, 4, 3, 2).requires_grad_(False)

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        output = network(column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise, t)
        return (eye(output) - eye(x0)).square().mean()

    found, said = train(network, loss_of, rate=1e-4)
    assert found == [] and "weighed" not in said


def test_signals_that_a_loader_gives_as_rows():
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def loss_of(x0):
        noise = torch.randn_like(x0)
        return mse_loss(network(0.6 * x0 + 0.8 * noise), noise)

    train(network, loss_of, updates=30, data=torch.randn(32, 64))  # it fails where the doctor stops


def test_a_list_of_modules_is_not_the_name_of_the_network():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.all_modules = nn.ModuleList([Network()])

        def forward(self, x, t):
            return self.all_modules[0](x, t)

    class Alone(Listed):
        def __init__(self):
            super().__init__()
            self.all_modules = nn.ModuleList([nn.Conv2d(C, 8, 3, padding=1), nn.Conv2d(8, C, 3, padding=1)])

        def forward(self, x, t):
            return self.all_modules[1](torch.relu(self.all_modules[0](x)) + t.reshape(-1, 1, 1, 1) / T)

    assert " of Network;" in train(network := Listed(), vp(network))[1]
    assert " of Alone;" in train(network := Alone(), vp(network))[1]


def averaged(network, keep):
    """An average in the manner of many scripts: all of the state, copied with its two shares."""
    shadow = {name: value.clone() for name, value in network.state_dict().items()}

    def mix():
        with torch.no_grad():
            for name, value in network.state_dict().items():
                shadow[name].copy_(shadow[name] * keep + value * (1 - keep))

    return mix


class Twins(Network):
    """Has several weights of one shape, so that an average could be taken for that of another one."""

    def __init__(self):
        super().__init__()
        self.middle = nn.ModuleList([nn.Conv2d(16, 16, 1) for _ in range(4)])

    def forward(self, x, t):
        x = self.first(x) + self.embedding(t)
        for layer in self.middle:
            x = x + layer(torch.relu(x))
        return self.last(torch.relu(x))


def test_an_average_is_that_of_the_weights_that_it_was_made_of():
    network = Twins()
    found, said = train(network, vp(network), updates=40, rate=2e-4, after=averaged(network, 0.9999))
    assert found == [] and said.endswith("averages of 0.9999")
    network = Twins()
    assert train(network, vp(network), updates=40, rate=2e-4, after=averaged(network, 0.0001))[0] == ["ema-exchanged"]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_average_that_warms_up_is_said_to_be_on_its_way(as_tensor):
    network, count = Twins(), torch.tensor(0) if as_tensor else 0
    shadow = [parameter.detach().clone() for parameter in network.parameters()]

    @torch.no_grad()
    def mix():
        nonlocal count
        count += 1
        for old, new in zip(shadow, network.parameters()):
            old.sub_((1 - min(0.9999, (1 + count) / (10 + count))) * (old - new))

    found, said = train(network, vp(network), updates=16, after=mix)
    assert found == [] and said.endswith("averages of 0.59 so far")  # 13 / 22, made before update 13


@pytest.mark.parametrize("loss", [l1_loss, mse_loss, lambda output, noise: (output - noise).square().mean()])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_joins_each_sample_with_all_others(loss):
    network = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 1, 3, padding=1))

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        noised = ALPHA_BAR[t].sqrt()[:, None] * x0 + (1 - ALPHA_BAR[t]).sqrt()[:, None] * noise
        return loss(network(noised[:, None]), noise)  # [B, 1, L] and [B, L]

    assert "weight-square" in train(network, loss_of, data=torch.randn(64, 256))[0]


class OfUnitWeights(Network):
    """It normalizes its weights in each pass, and leaves them as large as they are."""

    def __init__(self):
        super().__init__()
        for layer in (self.first, self.last):
            nn.init.normal_(layer.weight)
            layer.bias = None

    def forward(self, x, t):
        first, last = (w / w.flatten(1).norm(dim=1)[:, None, None, None] for w in (self.first.weight, self.last.weight))
        hidden = torch.relu(nn.functional.conv2d(x, first, padding=1) + self.embedding(t))
        return nn.functional.conv2d(hidden, last, padding=1)


def test_a_high_rate_of_large_weights_that_are_normalized_is_right():
    assert train(network := OfUnitWeights(), vp(network), rate=0.02)[0] == []
    assert "rate-high" in train(network := Network(), vp(network), rate=0.02)[0]


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


@pytest.mark.parametrize("first", [6, 7])
@pytest.mark.parametrize(("told", "codes"), [(lambda t: t, []), (torch.flipud, ["timestep-other"])])
def test_what_is_trained_after_an_autoencoder_is_watched(told, codes, first):
    network, autoencoder = Network(), nn.Sequential(nn.Conv2d(C, 64, 3, padding=1), nn.Conv2d(64, C, 3, padding=1))
    adam, data = torch.optim.Adam(autoencoder.parameters()), pictures(B)

    def loss_of(x0):
        if not adam.state:
            for _ in range(first):
                adam.zero_grad()
                mse_loss(autoencoder(data), data).backward()
                adam.step()
        return vp(lambda x, t: network(x, told(t)))(x0)

    found, said = train(network, loss_of)
    assert found == codes and " of Network; variance-preserving path, epsilon" in said


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


@pytest.mark.parametrize(
    ("shares", "codes"), [(ALPHA_BAR, ["input-no-square-roots"]), (1 - torch.arange(1, T + 1) / (T + 1), [])]
)
def test_a_straight_path_is_in_even_steps(shares, codes):
    network = Network()

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        return mse_loss(network(column(shares[t]) * x0 + column(1 - shares[t]) * noise, t), noise)

    assert train(network, loss_of)[0] == codes


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


def test_fields_have_no_range_and_pictures_do():
    network = Network()

    def loss_of(clean):
        t, noise = torch.randint(0, T, (len(clean),)), torch.randn_like(clean)
        return mse_loss(network(column(ALPHA_BAR[t].sqrt()) * clean + column((1 - ALPHA_BAR[t]).sqrt()) * noise, t), noise)

    assert not train(network, loss_of, data=0.68 * torch.randn(64, C, SIDE, SIDE, generator=torch.Generator().manual_seed(1)))[
        0
    ]
    assert train(network, loss_of, data=2 * pictures() - 1)[0] == ["data-range"]


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


def test_an_average_that_is_copied_from_the_weights_to_the_weights():
    network = Network()
    codes, _ = train(network, vp(network), after=lambda: network.load_state_dict(network.state_dict()))
    assert codes == ["ema-is-the-network"]
    seldom, of_one = iter(range(99)), lambda: network.last.bias.data.copy_(network.last.bias.data)
    assert not train(network, vp(network), after=of_one)[0]
    after = lambda: next(seldom) == 3 and network.load_state_dict(network.state_dict())  # noqa: E731
    assert not train(network, vp(network), after=after)[0]


class Labels(nn.Module):
    """Leaves labels out where it is told to, as those of DiT do."""

    def __init__(self):
        super().__init__()
        self.dropout_prob, self.table = 0.1, nn.Embedding(5, 16)

    def forward(self, labels, train):
        return self.table(torch.where(torch.rand(len(labels)) < self.dropout_prob, 4, labels) if train else labels)


class WithLabels(Network):
    def __init__(self):
        super().__init__()
        self.labels = Labels()

    def forward(self, x, t):
        labels = self.labels(torch.arange(len(x)) % 4, self.training)
        return self.last(torch.relu(self.first(x) + self.embedding(t) + labels[:, :, None, None]))


@pytest.mark.parametrize("mode", [True, False])
def test_labels_that_a_module_below_leaves_out_in_training_mode(mode):
    network = WithLabels().train(mode)
    assert ("network-evaluation-mode" in train(network, vp(network), updates=40)[0]) != mode


@pytest.mark.parametrize("trains", [False, True])
def test_a_frozen_part_rests_in_evaluation_mode(trains):
    network = Network()
    network.time = nn.Sequential(network.time, nn.Dropout(0.1)).requires_grad_(trains).eval()
    assert ("network-evaluation-mode" in train(network, vp(network), updates=40)[0]) == trains
