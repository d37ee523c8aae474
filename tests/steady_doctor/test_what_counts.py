"""Losses of a part of each image, networks that are told it; passes and gradients that are no part of the step."""

import pytest
import torch
from small_loops import ALPHA_BAR, Network, T, column, pictures
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import mse_loss

from steady_doctor.doctor import Doctor


def found_in(run):
    torch.manual_seed(0)
    doctor = Doctor()
    with doctor.install():
        run()
    assert doctor.session.failure is None
    return [one.code for one in doctor.findings(ended=True)]


def noised(x0):
    t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
    return column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise, noise, t


def fill_in(known=lambda mask: mask, counted=lambda mask: 1 - mask):
    """A network that is given a part of the image, and noise for the rest, which is what the loss counts."""
    network = Network(channels=6)
    images, optimizer = pictures(), torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(9):
        x0 = images[torch.randint(0, 64, (8,))]
        mask = (torch.rand(8, 1, 8, 8) < 0.5).float().expand_as(x0)
        noisy, noise, t = noised(x0)
        error = network(torch.cat([(1 - mask) * noisy, known(mask) * x0], 1), t) - noise
        loss = (error * counted(mask)).square().sum() / counted(mask).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"counted": lambda mask: mask}, ["target-unnoised"]),
        ({"known": lambda mask: 1 - mask}, ["condition-clean"]),
    ],
)
def test_a_mask_says_what_is_known_and_what_counts(change, expected):
    assert found_in(lambda: fill_in(**change)) == expected


def train(network, updates=30, before_step=lambda weights: None, rate=1e-3):
    optimizer = torch.optim.Adam(network.parameters(), rate)
    for _ in range(updates):
        noisy, noise, t = noised(pictures()[torch.randint(0, 64, (8,))])
        optimizer.zero_grad()
        mse_loss(network(noisy, t), noise).backward()
        before_step(list(network.parameters()))
        optimizer.step()


def test_a_step_by_the_gradient_at_another_place_has_two_passes():
    """Sharpness-aware: the first pass says where the second one is made."""
    network, images = Network(), pictures()
    optimizer = torch.optim.SGD(network.parameters(), 1e-2)

    def run():
        for _ in range(9):
            noisy, noise, t = noised(images[torch.randint(0, 64, (8,))])
            mse_loss(network(noisy, t), noise).backward()
            moves = [0.05 * weight.grad / (weight.grad.norm() + 1e-12) for weight in network.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(network.parameters()), moves)
            optimizer.zero_grad()
            mse_loss(network(noisy, t), noise).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(network.parameters()), moves)
            optimizer.step()
            optimizer.zero_grad()

    assert found_in(run) == []


def cut_at_zero(weights):
    for weight in weights:
        weight.grad.clamp_(min=0)


def test_gradients_of_one_sign_are_cut_at_zero():
    assert found_in(lambda: train(Network(), before_step=cut_at_zero)) == ["gradient-cut-on-one-side"]


def test_effects_come_after_a_rate_of_zero():
    class Closed(Network):
        """What it is told of the time comes in through weights of zero, as those of adapters are at first."""

        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(16, 16)
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)

        def embedding(self, t):
            return self.gate(super().embedding(t).flatten(1))[:, :, None, None]

    assert found_in(lambda: train(Closed(), rate=0.0))[0] == "rate-zero"


def test_what_else_gradients_are_asked_of():
    """Of a penalty's graph, by an iterator, of a frozen network, and of an edge of the graph, as without the doctor."""
    network, other, images = Network(), Network(), pictures()

    def run():
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        for _ in range(9):
            noisy, noise, t = noised(images[torch.randint(0, 64, (8,))])
            noisy_leaf = noisy.requires_grad_()
            loss = mse_loss(network(noisy_leaf, t), noise)
            slopes = torch.autograd.grad(loss, network.parameters(), create_graph=True)
            torch.autograd.grad(mse_loss(other(noisy, t), noise), other.parameters())
            (slope,) = torch.autograd.grad(get_gradient_edge(loss), noisy_leaf, torch.ones(()), retain_graph=True)
            assert slope.shape == noisy.shape
            optimizer.zero_grad()
            (loss + 1e-4 * sum(slope.square().sum() for slope in slopes)).backward()
            optimizer.step()

    assert found_in(run) == []


def test_gradients_of_two_losses_of_one_pass_are_not_judged():
    network, images = Network(), pictures()
    weights, optimizer = list(network.parameters()), torch.optim.Adam(network.parameters(), 1e-3)

    def run():
        for _ in range(9):
            noisy, noise, t = noised(images[torch.randint(0, 64, (8,))])
            error = (network(noisy, t) - noise).square()
            first = torch.autograd.grad(error.mean(), weights, retain_graph=True)
            second = torch.autograd.grad(error[:4].mean(), weights)
            for weight, one, other in zip(weights, first, second):
                weight.grad = 0.7 * one + 0.3 * other
            optimizer.step()

    assert found_in(run) == []


def of_batches(size, loss_of, optimizer_of=torch.optim.Adam, end=lambda network: network, updates=14):
    """`loss_of`: of the output, the noise and the timesteps."""
    network, images = Network(), pictures()
    optimizer = optimizer_of(list(network.parameters()))
    for _ in range(updates):
        noisy, noise, t = noised(images[torch.randint(0, 64, (size,))])
        network.zero_grad()
        loss_of(end(network)(noisy, t), noise, t).backward()
        yield network, optimizer
        optimizer.step()


@pytest.mark.parametrize(("size", "codes"), [(6, ["weight-summed"]), (8, [])])
def test_a_sum_over_as_many_samples_as_rows_is_not_told_from_one_over_these(size, codes):
    """Images have 8 rows."""
    assert found_in(lambda: list(of_batches(size, lambda out, noise, t: (out - noise).square().mean((1, 2, 3)).sum()))) == codes


def test_copies_that_ask_for_no_gradient_are_trained():
    """An optimizer of copies, to which the script gives the gradients. The noised images are clamped."""

    def run():
        def copies(parameters):
            return torch.optim.Adam([parameter.detach().clone() for parameter in parameters])

        clamped = lambda network: lambda x, t: network(x.clamp(-1, 1), t)  # noqa: E731
        for network, optimizer in of_batches(6, lambda out, noise, t: mse_loss(out, noise), copies, clamped):
            for own, copied in zip(network.parameters(), optimizer.param_groups[0]["params"]):
                own.data.copy_(copied)
                copied.grad = own.grad.clone()

    assert "input-clamped" in found_in(run)


def test_a_bound_beside_a_small_second_term():
    def loss_of(out, noise, t):
        return mse_loss(out, noise) + 0.01 * (out.mean((2, 3)) - torch.zeros(6, 3)).square().mean()

    bounded = lambda network: lambda x, t: torch.tanh(network(x, t))  # noqa: E731
    assert "network-bounded" in found_in(lambda: list(of_batches(6, loss_of, end=bounded)))


def test_whether_a_sample_counts_by_the_level_of_another_one():
    def loss_of(out, noise, t):
        counts = column((t < 600).float().roll(1))
        return ((out - noise).square() * counts).mean()

    assert "weight-not-of-level" in found_in(lambda: list(of_batches(24, loss_of)))
