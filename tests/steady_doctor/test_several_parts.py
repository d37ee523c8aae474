"""Loops with more than one network, training or term: which of them is judged; and what no step or gradient reaches."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from small_loops import ALPHA_BAR, B, C, Network, T, column, pictures, train, vp
from torch import nn
from torch.nn.functional import mse_loss

from steady_doctor.described import described
from steady_doctor.doctor import Doctor

VP = "variance-preserving path, epsilon, errors weighed equally"


def noised(x0, t, noise):
    return column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise


def drawn(x0):
    return torch.randint(0, T, (len(x0),)), torch.randn_like(x0)


def watched(loop, ended=True):
    torch.manual_seed(0)
    doctor = Doctor()
    with doctor.install():
        loop()
    assert doctor.session.failure is None
    codes = [one.code for one in doctor.findings(ended)]
    return codes, described(doctor.told)


def steps(network, loss_of, count, parameters=None, scaler=None):
    optimizer = torch.optim.Adam(list(parameters or network.parameters()), 1e-3)
    images = pictures()
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of(images[torch.randint(0, len(images), (B,))])
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize(("second", "codes"), [(vp, []), (None, []), ("other noise", ["target-other"])])
def test_the_training_that_comes_after_another_one_is_watched(second, codes):
    """A base, and what is fine-tuned then; after them a judge of samples, which is no denoiser."""
    base, later = Network(), Network()

    def other_noise(x0):
        t, noise = drawn(x0)
        return mse_loss(later(noised(x0, t, noise), t), torch.randn_like(x0))

    def loop():
        steps(base, vp(base), 22)
        if second is not None:
            steps(later, other_noise if second == "other noise" else vp(later), 36)
        judge = nn.Linear(C, 1)
        steps(judge, lambda x0: judge(x0.mean((2, 3))).square().mean(), 24)

    found, said = watched(loop)
    assert found == codes
    assert said.startswith("36 updates of Network, after another training" if second else "22 updates of Network; ")
    assert codes or VP in said


class TwoHeads(Network):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 6)

    def forward(self, x, t):
        hidden = torch.relu(self.first(x) + self.embedding(t))
        return self.last(hidden), self.head(hidden.flatten(2).transpose(1, 2))


@pytest.mark.parametrize(
    ("target", "codes"), [(lambda noise: noise, []), (lambda noise: torch.randn_like(noise), ["target-other"])]
)
def test_a_term_of_another_head_and_a_frozen_encoder_leaves_the_target(target, codes):
    network, encoder = TwoHeads(), nn.Conv2d(C, 6, 1).requires_grad_(False)

    def loss_of(x0):
        t, noise = drawn(x0)
        output, seen = network(noised(x0, t, noise), t)
        features = encoder(x0).flatten(2).transpose(1, 2)
        return mse_loss(output, target(noise)) - 0.5 * torch.cosine_similarity(seen, features, dim=-1).mean()

    found, said = train(network, loss_of)
    assert found == codes and (codes or VP in said)


@pytest.mark.parametrize(
    ("last", "codes"), [(torch.tanh, ["network-bounded"]), (torch.relu, ["network-bounded"]), (lambda x: 3 * torch.tanh(x), [])]
)
def test_an_activation_after_the_last_layer_bounds_the_noise(last, codes):
    network = Network()
    plain = network.forward
    network.forward = lambda x, t: last(plain(x, t))
    assert train(network, vp(network))[0][:1] == codes


def test_an_activation_that_gives_all_images_is_right():
    network = Network()
    plain = network.forward
    network.forward = lambda x, t: torch.tanh(plain(x, t))

    def loss_of(x0):
        t, noise = drawn(x0)
        return mse_loss(network(noised(x0, t, noise), t), x0)

    assert train(network, loss_of)[0] == []


@pytest.mark.parametrize(("broken", "codes"), [(True, ["network-not-finite"]), (False, [])])
def test_steps_that_a_scaler_leaves_out(broken, codes):
    """Of a loss that is not finite all; else those in which it finds its scale."""
    network = Network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16 if broken else 2.0**127)
    usual = vp(network)
    found, said = watched(lambda: steps(network, lambda x0: usual(x0) * (torch.inf if broken else 1.0), 30, scaler=scaler))
    assert found == codes and ("no optimizer step was seen" in said) == broken


def test_an_optimizer_of_copies_gets_no_gradient():
    network = Network()
    copies = {name: value.detach().clone().requires_grad_() for name, value in network.named_parameters()}

    def loop():
        optimizer, images = torch.optim.Adam(network.parameters()), pictures()
        for _ in range(8):
            x0 = images[torch.randint(0, len(images), (B,))]
            t, noise = drawn(x0)
            loss = mse_loss(torch.func.functional_call(network, copies, (noised(x0, t, noise), t)), noise)
            for copy_, gradient in zip(copies.values(), torch.autograd.grad(loss, list(copies.values()))):
                copy_.grad = gradient
            optimizer.step()

    assert watched(loop)[0][0] == "optimizer-without-gradient"


@pytest.mark.parametrize(
    ("told", "codes"), [(lambda t: t, []), (lambda t: torch.from_numpy(np.random.randint(0, T, len(t))), [])]
)
def test_shares_that_numpy_computes(told, codes):
    """Of what the network is told of them nothing is known."""
    network, bars = Network(), ALPHA_BAR.double().numpy()

    def loss_of(x0):
        t, noise = np.random.randint(0, T, len(x0)), torch.randn_like(x0)
        a, b = (torch.from_numpy(share[t]).float() for share in (np.sqrt(bars), np.sqrt(1 - bars)))
        return mse_loss(network(column(a) * x0 + column(b) * noise, told(torch.from_numpy(t))), noise)

    found, said = train(network, loss_of)
    assert found == codes and VP in said


class WithMore(Network):
    """Nothing depends on one of its layers."""

    def __init__(self):
        super().__init__()
        self.more = nn.Conv2d(16, 1, 1)

    def forward(self, x, t):
        hidden = torch.relu(self.first(x) + self.embedding(t))
        self.more(hidden)
        return self.last(hidden)


@pytest.mark.parametrize(("told", "is_named"), [(lambda t: t, False), (lambda t: t.roll(1), True)])
def test_levels_that_plain_numbers_look_up(told, is_named):
    """The sigma of each timestep, as scripts of diffusers find it: what the network is told led through Python's numbers."""
    network, sigmas = WithMore(), torch.linspace(1, 1e-3, T)
    timesteps = sigmas * T

    def loss_of(x0):
        t, noise = timesteps[(torch.rand(len(x0)) * T).long()], torch.randn_like(x0)
        sigma = column(sigmas[[(timesteps == each).nonzero().item() for each in t]])
        return mse_loss(network((1 - sigma) * x0 + sigma * noise, told(t)), noise - x0)

    found, said = train(network, loss_of)
    assert ("timestep-not-told" in found) == is_named and "straight path" in said


class Averaged(nn.Module):
    """Its average is a part of it, and the optimizer has both."""

    def __init__(self):
        super().__init__()
        self.network = Network()
        self.average = copy.deepcopy(self.network).requires_grad_(False)

    def follow(self):
        with torch.no_grad():
            for mine, own in zip(self.average.parameters(), self.network.parameters()):
                mine.lerp_(own, 0.1)


def test_averages_among_the_parameters_are_no_weights_that_are_written():
    both = Averaged()
    found, said = train(both, vp(both.network), after=both.follow)
    assert found == [] and VP in said and "averages of 0.9" in said


@pytest.mark.parametrize("written", [False, True])
def test_rows_that_are_put_back_after_each_step(written):
    """As those of all words but a new one, on purpose; and weights that are scaled."""
    network, table = Network(), nn.Parameter(torch.randn(100, 16))
    before = table.detach().clone()
    network.requires_grad_(False)

    def loss_of(x0):
        t, noise = drawn(x0)
        hidden = torch.relu(network.first(noised(x0, t, noise)) + network.embedding(t) + table.mean(0)[:, None, None])
        return mse_loss(network.last(hidden), noise)

    def loop():
        optimizer, images = torch.optim.AdamW([table], 1e-2), pictures()
        for _ in range(14):
            optimizer.zero_grad()
            loss_of(images[torch.randint(0, len(images), (B,))]).backward()
            optimizer.step()
            with torch.no_grad():
                if written:
                    table.mul_(0.99)
                else:
                    table[:99] = before[:99]

    assert ("state-weights-written" in watched(loop)[0]) == written


class MayDrop(Network):
    def __init__(self):
        super().__init__()
        self.nothing, self.read = nn.Parameter(torch.randn(4)), nn.Linear(4, 16)

    def forward(self, x, t, condition, dropped):
        condition = torch.where(dropped[:, None], self.nothing, condition)
        return self.last(torch.relu(self.first(x) + self.embedding(t) + self.read(condition)[:, :, None, None]))


def test_what_stands_for_no_condition_gets_no_gradient_where_none_is_dropped():
    network = MayDrop()

    def loss_of(x0):
        t, noise = drawn(x0)
        condition = x0.mean((2, 3)) @ torch.ones(C, 4)
        return mse_loss(network(noised(x0, t, noise), t, condition, torch.zeros(len(x0), dtype=torch.bool)), noise)

    assert train(network, loss_of, updates=22)[0] == []


@pytest.mark.parametrize(("is_told", "codes"), [(False, []), (True, ["target-path"])])
def test_a_known_target_times_a_factor(is_told, codes):
    """As where the gradient of an energy is learned, without a level."""
    network = Network() if is_told else nn.Conv2d(C, C, 3, padding=1)

    def loss_of(x0):
        s, noise = torch.rand(len(x0)) * 0.9, torch.randn_like(x0)
        given = ((1 - column(s)) * x0 + column(s) * noise, 1000 * s)
        return mse_loss(network(*given[: 1 + is_told]), 4 * (1 - column(s)) * (noise - x0))

    assert train(network, loss_of)[0] == codes


def test_a_network_without_a_place_for_the_level_may_be_meant():
    network = nn.Sequential(nn.Conv2d(C, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, C, 3, padding=1))

    def loss_of(x0):
        t, noise = drawn(x0)
        return mse_loss(network(noised(x0, t, noise)), noise)

    assert train(network, loss_of)[0] == []


@pytest.mark.parametrize("told", [torch.zeros_like, lambda t: torch.randint(0, T, t.shape)])
def test_a_network_that_is_told_something_else(told):
    network = Network()

    def loss_of(x0):
        t, noise = drawn(x0)
        return mse_loss(network(noised(x0, t, noise), told(t)), noise)

    assert train(network, loss_of)[0] in (["timestep-not-told"], ["timestep-other"])


def test_noise_of_one_channel_that_gets_another_shape_is_not_shared():
    network = nn.Sequential(nn.Conv1d(4, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 4, 5, padding=2))
    time = nn.Linear(1, 16)
    sounds = torch.randn(64, 1, 256, generator=torch.Generator().manual_seed(2)).cumsum(-1)
    sounds /= sounds.std()

    def loss_of(x0):
        t, noise = drawn(x0)
        bar = ALPHA_BAR[t].reshape(-1, 1, 1)
        given = (bar.sqrt() * x0 + (1 - bar).sqrt() * noise).reshape(len(x0), -1, 4).transpose(1, 2)
        hidden = network[0](given) + time(t[:, None] / T)[:, :, None]
        return mse_loss(network[2](torch.relu(hidden)).transpose(1, 2).reshape(len(x0), 1, -1), noise)

    both = nn.ModuleList([network, time])
    assert "noise-shared" not in train(both, loss_of, data=sounds)[0]


def test_a_network_compared_with_its_own_derivative_ends_nothing():
    """As where the mean velocity of a straight path is learned."""
    network = Network()

    def loss_of(x0):
        t, noise = torch.rand(len(x0)), torch.randn_like(x0)
        given, velocity = (1 - column(t)) * x0 + column(t) * noise, noise - x0
        output, slope = torch.func.jvp(network, (given, t), (velocity, torch.ones_like(t)))
        return mse_loss(output, (velocity - column(t) * slope).detach())

    assert train(network, loss_of)[0] == []


def test_an_optimizer_that_goes_on_is_no_later_training():
    """As where a discriminator is trained for some steps first, and then by turns."""
    network, other = Network(), nn.Linear(C, 1)

    def loop():
        adam, images, usual = torch.optim.Adam(network.parameters(), 1e-3), pictures(), vp(network)
        for _ in range(3):
            for _ in range(12):
                adam.zero_grad()
                usual(images[torch.randint(0, len(images), (B,))]).backward()
                adam.step()
            if not hasattr(other, "adam"):
                other.adam = torch.optim.Adam(other.parameters(), 1e-3)
            for _ in range(10):
                other.adam.zero_grad()
                other(images[:B].mean((2, 3))).square().mean().backward()
                other.adam.step()

    found, said = watched(loop)
    assert found == [] and said.startswith("36 updates of Network; ") and VP in said


def test_a_larger_network_that_comes_later_leaves_what_was_found():
    network, judge = Network(), nn.Sequential(nn.Conv2d(C, 128, 5), nn.ReLU(), nn.Conv2d(128, 1, 4))

    def other_noise(x0):
        t, noise = drawn(x0)
        return mse_loss(network(noised(x0, t, noise), t), torch.randn_like(x0))

    def loop():
        steps(network, other_noise, 22)
        steps(judge, lambda x0: judge(x0).square().mean(), 22)

    found, said = watched(loop)
    assert found == ["target-other"] and said.startswith("22 updates of Network; ")


def test_networks_that_a_script_gives_up_are_freed():
    kept = []

    def loop():
        for _ in range(3):
            network = Network()
            kept.append(weakref.ref(network))
            steps(network, vp(network), 22)
        del network
        gc.collect()
        assert [one() is None for one in kept][:2] == [True, True]

    assert watched(loop)[0] == []


def test_sparse_gradients_end_nothing():
    network, table = Network(), nn.Embedding(200, 16, sparse=True)

    def loop():
        adam, sgd, images = torch.optim.Adam(network.parameters(), 1e-3), torch.optim.SGD(table.parameters(), 0.1), pictures()
        for _ in range(14):
            x0 = images[torch.randint(0, len(images), (B,))]
            t, noise = drawn(x0)
            hidden = torch.relu(network.first(noised(x0, t, noise)) + network.embedding(t))
            loss = mse_loss(network.last(hidden + table(torch.randint(0, 200, (B,)))[:, :, None, None]), noise)
            for optimizer in (adam, sgd):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (adam, sgd):
                optimizer.step()

    assert watched(loop)[0] == []


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
