"""Healthy loops in styles of published code that a law once took for a fault, and the faults beside them."""

import copy

import pytest
import torch
from small_loops import ALPHA_BAR, B, C, Network, T, column, is_healthy, pictures, train, vp
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, mse_loss, softplus

from steady_doctor.doctor import Doctor


def level(count):
    """(t [count], its shares of the image and of the noise)."""
    t = torch.randint(0, T, (count,))
    return t, column(ALPHA_BAR[t].sqrt()), column((1 - ALPHA_BAR[t]).sqrt())


class Beside(Network):
    """It gets other channels beside the noised ones."""

    def __init__(self):
        super().__init__(channels=2 * C)

    def forward(self, x, t, other):
        return super().forward(torch.cat([x, other], 1), t)


def from_a_noised_image(network):
    """A path from a noised image to a sharp one (Fischer et al. 2023): the noise is a part of its end."""

    def loss_of(x0):
        low = nn.functional.interpolate(nn.functional.avg_pool2d(x0, 2), scale_factor=2)
        begin, t = 0.8 * low + 0.6 * torch.randn_like(low), torch.rand(len(x0))
        mixed = column(t) * x0 + (1 - column(t)) * begin
        return mse_loss(network(mixed, 1000 * t, low), x0 - begin)

    return loss_of


def away_from_others(network):
    """Stoica et al. 2025: also away from what is asked of another sample."""

    def loss_of(x0):
        t, noise = torch.rand(len(x0)), torch.randn_like(x0)
        output, wanted = network((1 - column(t)) * x0 + column(t) * noise, 1000 * t), noise - x0
        return mse_loss(output, wanted) - 0.05 * mse_loss(output, wanted.roll(1, 0))

    return loss_of


def preferred(network):
    """Wallace et al. 2023: two images with one noise and one level."""
    before = copy.deepcopy(network).requires_grad_(False)

    def loss_of(x0):
        t, a, b = (one.repeat(2, *[1] * (one.ndim - 1)) for one in level(len(x0) // 2))
        noise = torch.randn_like(x0[: len(x0) // 2]).repeat(2, 1, 1, 1)
        errors = [(one(a * x0 + b * noise, t) - noise).square().mean((1, 2, 3)) for one in (network, before)]
        better, worse = (errors[1] - errors[0]).chunk(2)
        return -logsigmoid(500 * (better - worse)).mean()

    return loss_of


def perturbed(network):
    """Ning et al. 2023, by a strength that is drawn once for the batch."""

    def loss_of(x0):
        (t, a, b), noise = level(len(x0)), torch.randn_like(x0)
        return mse_loss(network(a * x0 + b * (noise + 0.1 * torch.rand(1) * torch.randn_like(x0)), t), noise)

    return loss_of


class OfMeans(Network):
    def __init__(self):
        super().__init__(channels=2 * C)
        self.mean = nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x, t, mean):
        return super().forward(torch.cat([x, mean], 1), t)


def to_a_trained_mean(network):
    """Popov et al. 2021: what is noised goes to a mean that an encoder makes of the text."""

    def loss_of(x0):
        (t, a, b), noise = level(len(x0)), torch.randn_like(x0)
        mean = network.mean(x0.roll(1, 2))
        return mse_loss(network(a * x0 + (1 - a) * mean + b * noise, t, mean), noise) + mse_loss(mean, x0)

    return loss_of


def of_clamped_levels(network):
    """Pernias et al. 2023: the times at both ends have one level each."""

    def loss_of(x0):
        t, noise = torch.rand(len(x0)) * 1.2 - 0.1, torch.randn_like(x0)
        bar = column(torch.cos(t * torch.pi / 2) ** 2).clamp(0.05, 0.95)
        return mse_loss(network(bar.sqrt() * x0 + (1 - bar).sqrt() * noise, 1000 * t), noise)

    return loss_of


def over_its_spread(network):
    """Chen 2023: the spread that a sample is divided by is kept from 0."""

    def loss_of(x0):
        (t, a, b), noise = level(len(x0)), torch.randn_like(x0)
        noised = 0.5 * a * x0 + b * noise
        return mse_loss(network(noised / noised.std((1, 2, 3), keepdim=True).clamp(min=1e-5), t), noise)

    return loss_of


def of_the_last_row(network):
    """Noise and EDM's target of the last row alone (Reuss et al. 2023)."""

    def loss_of(x0):
        sigma, noise = column((torch.randn(len(x0)) - 1.2).exp()), torch.randn_like(x0)
        noise[:, :, :-1] = 0
        scale, noised = (sigma**2 + 0.25).sqrt(), x0 + sigma * noise
        wanted = (x0 - 0.25 / scale**2 * noised) / (0.5 * sigma / scale)
        return (network(noised / scale, sigma.log() / 4) - wanted)[:, :, -1].square().mean()

    return loss_of


def of_some_numbers(network):
    """Errors of a part of each sample, and of some sample nothing."""

    def loss_of(x0):
        (t, a, b), noise = level(len(x0)), torch.randn_like(x0)
        there = (torch.rand(x0.shape) < column(torch.rand(len(x0)))) & (column(torch.arange(len(x0))) > 0)
        return ((network(a * x0 + b * noise, t) - noise).square() * there).sum() / there.sum()

    return loss_of


class Adapted(Network):
    """Most of it rests. Its trained layer began as a copy of one that rests, and stands in its place (Kumari et al. 2023)."""

    def __init__(self):
        super().__init__()
        self.middle, self.more = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.requires_grad_(False)
        self.trained = copy.deepcopy(self.middle).requires_grad_(True)

    def forward(self, x, t):
        return self.last(self.more(self.trained(torch.relu(self.first(x) + self.embedding(t)))))


class OfTwo(Network):
    """Images and words are two parts of one sequence; what its last layer makes of the words is cut off."""

    def __init__(self):
        super().__init__()
        self.words = nn.ModuleList(nn.Conv2d(C, 16, 1) for _ in range(2))
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(12))
        self.join = nn.Conv2d(16, 16, 1)

    def forward(self, x, t):
        hidden, cut = self.first(x) + self.words[0](x) + self.embedding(t), self.words[1](x)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return self.last(self.join(torch.cat([hidden, cut], 2))[:, :, : x.shape[2]])


@pytest.mark.parametrize(
    ("loss", "network", "words"),
    [
        (from_a_noised_image, Beside, "the image in its input was not identified"),
        (away_from_others, Network, "straight path from images to noise, an unknown target"),
        (preferred, Network, "variance-preserving path"),
        (perturbed, Network, "variance-preserving path, epsilon, errors weighed equally"),
        (to_a_trained_mean, OfMeans, "no mixture of image and noise was identified"),
        (of_clamped_levels, Network, "variance-preserving path, epsilon"),
        (over_its_spread, Network, "epsilon"),
        (of_the_last_row, Network, "scaled for sigma_data 0.5, EDM's target"),
        (of_some_numbers, Network, "variance-preserving path, epsilon"),
        (vp, OfTwo, "variance-preserving path, epsilon"),
    ],
)
def test_nothing_is_found(loss, network, words):
    is_healthy(made := network(), loss(made), words, updates=24)


class OfSteps(nn.Module):
    """Each step of a series is an image, and its condition what a network read before it (Rasul et al. 2021)."""

    def __init__(self):
        super().__init__()
        self.read = nn.GRU(C, 16, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(C + 17, 32), nn.SiLU(), nn.Linear(32, C))

    def forward(self, x, t, told):
        return self.layers(torch.cat([x, t[:, None] / T, told], 1))


def test_steps_of_all_samples_in_one_axis():
    network = OfSteps()

    def loss_of(x0):
        series = x0.flatten(2).transpose(1, 2)[:, :9]
        told = network.read(series[:, :-1])[0].flatten(0, 1)
        following, t = series[:, 1:].flatten(0, 1), torch.randint(0, T, (8 * len(x0),))
        a, b, noise = ALPHA_BAR[t, None].sqrt(), (1 - ALPHA_BAR[t, None]).sqrt(), torch.randn_like(following)
        return mse_loss(network(a * following + b * noise, t, told), noise)

    assert train(network, loss_of)[0] == []


class Averaging(torch.optim.Optimizer):
    """Vahdat & Kautz 2020: it wraps another one, and shares its groups."""

    def __init__(self, inner):
        self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups

    def step(self):
        self.inner.step()


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_schedule_of_an_optimizer_around_another_one(wrapped):
    network = Network()
    doctor = Doctor()
    with doctor.install():
        inner = torch.optim.Adam(network.parameters(), 1e-3)
        of = Averaging(inner) if wrapped else torch.optim.Adam(network.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(of, 24)
        for _ in range(24):
            inner.zero_grad()
            vp(network)(pictures(B)).backward()
            (of if wrapped else inner).step()
            of._opt_called = True  # what torch notes of optimizers that have stepped
            schedule.step()
    assert ("rate-other-optimizer" in [one.code for one in doctor.findings(True)]) != wrapped


@pytest.mark.parametrize(("name", "codes"), [("SubVPSDE", []), ("Network", ["input-sub-vp"])])
def test_what_a_network_is_called_by_says_which_path_is_meant(name, codes):
    network = type(name, (Network,), {})()

    def loss_of(x0):
        t, a, b = level(len(x0))
        noise = torch.randn_like(x0)
        return mse_loss(network(a * x0 + b**2 * noise, t), noise)

    assert train(network, loss_of)[0] == codes


@pytest.mark.parametrize(("mirrored", "shuffled"), [(False, True), (True, False), (False, False)])
def test_samples_that_were_each_brought_to_a_mean_of_0(mirrored, shuffled):
    network, doctor = Network(), Doctor()
    images = pictures() - pictures().mean((1, 2, 3), keepdim=True)

    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return len(images)

        def __getitem__(self, place):
            return images[place].flip(-1) if mirrored and torch.rand(()) < 0.5 else images[place]

    with doctor.install():
        optimizer, loss_of = torch.optim.Adam(network.parameters()), vp(network)
        loader = torch.utils.data.DataLoader(Images(), B, shuffle=shuffled)
        for _ in range(6):
            for batch in loader:
                optimizer.zero_grad()
                loss_of(batch).backward()
                optimizer.step()
    assert ("data-not-shuffled" in [one.code for one in doctor.findings(True)]) != shuffled


def test_one_ratio_of_image_and_noise_at_all_levels():
    network = Network()

    def loss_of(x0):
        sigma, noise = torch.exp(1.2 * torch.randn(len(x0)) - 1), torch.randn_like(x0)
        scale = column((sigma**2 + 0.25) ** -0.5)
        return mse_loss(network(scale * (x0 + noise), 100 * sigma), x0)

    assert "input-path" in train(network, loss_of)[0]


def test_noise_of_one_beta_alone_and_images_of_one_alpha():
    network, betas = Network(), torch.linspace(1e-4, 0.5, 50)

    def loss_of(x0):
        t, noise = torch.randint(0, 50, (len(x0),)), torch.randn_like(x0)
        return mse_loss(network(column((1 - betas[t]).sqrt()) * x0 + column(betas[t].sqrt()) * noise, t), noise)

    assert "input-signal-left" in train(network, loss_of)[0]


@pytest.mark.parametrize("own", [True, False])
def test_an_average_that_is_drawn_to_itself(own):
    network, average = Network(), Network()
    average.load_state_dict(network.state_dict())
    average.requires_grad_(False)

    @torch.no_grad()
    def mix():
        for old, new in zip(average.parameters(), network.parameters()):
            old.copy_(0.999 * old) if own else old.mul_(0.999).add_(new, alpha=1e-3)

    torch.manual_seed(0)
    doctor = Doctor()
    with doctor.install():
        optimizer, loss_of = torch.optim.Adam(network.parameters()), vp(network)
        for _ in range(24):
            optimizer.zero_grad()
            loss_of(pictures(B)).backward()
            optimizer.step()
            mix()
    assert [one.code for one in doctor.findings(True)] == (["ema-never-updated"] if own else [])


@pytest.mark.parametrize(("until", "ends"), [(99, False), (0, False), (6, True)])
def test_batches_are_normalized_to_the_end_or_never(until, ends):
    network, update = Network(), iter(range(99))
    network.first = nn.Sequential(network.first, nn.BatchNorm2d(16))
    network.train(until > 0)
    found, _ = train(network, vp(network), updates=24, after=lambda: network.train(next(update) < until))
    assert ("network-evaluation-mode" in found) == ends


class OfClouds(nn.Module):
    """It gets points that are noised, and a code of 32 numbers that is drawn."""

    def __init__(self):
        super().__init__()
        self.first, self.told, self.last = nn.Linear(3, 32), nn.Linear(33, 32), nn.Linear(32, 3)

    def forward(self, x, t, code):
        told = self.told(torch.cat([code, t[:, None] / T], 1))
        return self.last(torch.relu(self.first(x) + told[:, None]))


def test_normalization_that_rests_on_purpose_while_the_network_trains():
    network, update = Network(), iter(range(99))
    network.first = nn.Sequential(network.first, nn.BatchNorm2d(16))
    found, _ = train(network, vp(network), updates=24, after=lambda: network.first[1].train(next(update) < 6))
    assert "network-evaluation-mode" not in found


def test_what_is_asked_of_two_samples_alike():
    network = Network()

    def loss_of(x0):
        (t, a, b), noise = level(len(x0)), torch.randn_like(x0)
        output = network(a * x0 + b * noise, t)
        return mse_loss(output, noise) + mse_loss(output, noise.roll(1, 0))

    assert train(network, loss_of)[0] == ["target-other"]


def test_one_level_and_a_contrast_that_is_changed_after_the_noise():
    network = Network()

    def loss_of(x0):
        scale = column(0.5 + torch.rand(len(x0)))
        return mse_loss(network(scale * (x0 + 0.5 * torch.randn_like(x0)), torch.zeros(len(x0))), scale * x0)

    assert "input-path" not in train(network, loss_of)[0]


@pytest.mark.parametrize(("points", "codes"), [(16, []), (1, ["noise-shared"])])
def test_noise_beside_a_larger_draw_of_a_code(points, codes):
    network = OfClouds()

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn(len(x0), points, 3).expand(-1, 16, -1)
        mixed = ALPHA_BAR[t, None, None].sqrt() * x0 + (1 - ALPHA_BAR[t, None, None]).sqrt() * noise
        return mse_loss(network(mixed, t, torch.randn(len(x0), 32)), noise)

    clouds = torch.randn(64, 16, 3, generator=torch.Generator().manual_seed(1))
    assert codes == [code for code in train(network, loss_of, data=clouds)[0] if code.startswith("noise")]


@pytest.mark.parametrize(("scale", "codes"), [(B * C * 8 * 8, []), (None, ["weight-summed"])])
def test_a_loss_scale_that_is_as_large_as_a_sum(scale, codes):
    """A GradScaler takes it off again."""
    network, doctor = Network(), Doctor()
    loss_of, optimizer = vp(network), torch.optim.Adam(network.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    with doctor.install():
        for _ in range(14):
            optimizer.zero_grad()
            loss = loss_of(pictures(B))
            scaler.scale(loss if scale else loss * B * C * 8 * 8).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [one.code for one in doctor.findings()] == codes


@pytest.mark.parametrize("is_average", [False, True])
def test_what_the_layers_of_an_adapter_were_copied_from(is_average):
    """Beside it, an average of these layers that is never updated is named."""
    network, doctor = Adapted(), Doctor()
    average = copy.deepcopy(network.trained).requires_grad_(False) if is_average else None
    loss_of, optimizer = vp(network), torch.optim.Adam(network.trained.parameters(), 1e-3)
    with doctor.install():
        for _ in range(24):
            optimizer.zero_grad()
            loss_of(pictures(B)).backward()
            optimizer.step()
    assert [one.code for one in doctor.findings(ended=True)] == ["ema-never-updated"] * (average is not None)


def test_a_generator_gets_noise_alone():
    """Goodfellow et al. 2014: what it makes is judged by another network."""
    maker, judge = (nn.Sequential(nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, out)) for out in (192, 1))
    doctor, ones = Doctor(), torch.ones(B, 1)
    with doctor.install():
        of_maker, of_judge = (torch.optim.Adam(one.parameters(), 2e-4) for one in (maker, judge))
        for _ in range(24):
            made = maker(torch.randn(B, 192))
            of_judge.zero_grad()
            (softplus(-judge(pictures(B).flatten(1))) + softplus(judge(made.detach()))).mean().backward()
            of_judge.step()
            of_maker.zero_grad()
            binary_cross_entropy_with_logits(judge(made), ones).backward()
            of_maker.step()
    assert [one.code for one in doctor.findings()] == []


@pytest.mark.parametrize("new", [0, 1])
def test_samples_of_an_energy_are_no_passes(new):
    """Du & Mordatch 2019: negative samples, `new` ones and some of a buffer, follow the slope of the energy, with noise."""
    network, doctor = nn.Sequential(nn.Linear(192, 32), nn.SiLU(), nn.Linear(32, 1)), Doctor()
    optimizer, buffer = torch.optim.Adam(network.parameters(), 1e-4), torch.rand(64, 192) * 2 - 1
    noise, images = torch.empty(B, 192), pictures().flatten(1)
    with doctor.install():
        for _ in range(16):
            x = torch.cat([torch.rand(new, 192) * 2 - 1, buffer[torch.randint(0, 64, (B - new,))]]).requires_grad_()
            network.requires_grad_(False)
            for _ in range(4):
                noise.normal_(0, 0.01)
                x.data.add_(noise).clamp_(-1, 1)
                (slope,) = torch.autograd.grad(network(x).sum(), x) if new else (network(x).sum().backward(), x.grad)[1:]
                x.data.add_(slope.clamp(-0.03, 0.03), alpha=10)
                x.grad = None
            network.requires_grad_(True)
            optimizer.zero_grad()
            (network(x.detach()).mean() - network(images[torch.randint(0, 64, (B,))]).mean()).backward()
            optimizer.step()
    assert doctor.session.failure is None and [one.code for one in doctor.findings()] == []


def to_what_was(network, x0):
    """Vincent et al. 2008, with inputs that are clipped."""
    return mse_loss(network((x0 + 0.3 * torch.randn_like(x0)).clamp(-1, 1)), x0)


def to_another_noisy_one(network, x0):
    """Lehtinen et al. 2018."""
    return mse_loss(network(x0 + 0.2 * torch.randn_like(x0)), x0 + 0.2 * torch.randn_like(x0))


def likelihood(network, x0):
    """A coupling of filled steps (Dinh et al. 2017)."""
    left, right = ((((x0 + 1) * 127.5).floor() + torch.rand_like(x0)) / 256).chunk(2, 3)
    scale, shift = network(left.repeat(1, 1, 1, 2)).chunk(2, 3)
    made = torch.cat([left, right * scale.tanh().exp() + shift], 3)
    return 0.5 * made.square().mean() - scale.tanh().mean()


@pytest.mark.parametrize("loss", [to_what_was, to_another_noisy_one, likelihood])
def test_noise_of_one_strength_that_the_network_is_not_told_is_no_diffusion(loss):
    network = nn.Sequential(nn.Conv2d(C, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, C, 3, padding=1))
    assert train(network, lambda x0: loss(network, x0), updates=24)[0] == []


def test_dense_levels_that_are_told_in_another_order():
    network = nn.ModuleDict({"time": nn.Linear(1, 16), "first": nn.Linear(2, 16), "last": nn.Linear(16, 2)})

    def loss_of(x0):
        t, noise = torch.rand(len(x0), 1) * 0.4 + 0.3, torch.randn_like(x0)
        told = t[torch.randperm(len(t))]
        hidden = torch.relu(network["first"]((1 - t) * x0 + t * noise) + network["time"](told))
        return mse_loss(network["last"](hidden), noise - x0)

    points = torch.randn(8192, 2, generator=torch.Generator().manual_seed(1))
    doctor, optimizer = Doctor(), torch.optim.Adam(network.parameters(), 1e-3)
    with doctor.install():
        for _ in range(14):
            optimizer.zero_grad()
            loss_of(points[torch.randint(0, 8192, (2048,))]).backward()
            optimizer.step()
    assert "timestep-other" in [one.code for one in doctor.findings()]
