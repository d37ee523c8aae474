"""Scripts that have no optimizer of torch: they ask for gradients, and write to their weights themselves."""

import pytest
import torch
from small_loops import ALPHA_BAR, Network, T, column, pictures
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from steady_doctor import words
from steady_doctor.described import described
from steady_doctor.doctor import Doctor


def loss_of(network, x0, noise_of=torch.randn_like, target_of=lambda x0, noise: noise, told=lambda t: t):
    t, noise = torch.randint(0, T, (len(x0),)), noise_of(x0)
    noisy = column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise
    return mse_loss(network(noisy, told(t)), target_of(x0, noise))


def functional(loss, updates):
    """Weights in a dictionary, torch.autograd.grad, Adam and an average by hand."""
    module, images = Network(), pictures()
    weights = {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}
    first, second, average = ({n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(3))
    for step in range(1, updates + 1):
        batch = images[torch.randint(0, len(images), (8,))]
        value = loss(lambda *given: functional_call(module, weights, given), batch)
        with torch.no_grad():
            for name, gradient in zip(weights, torch.autograd.grad(value, list(weights.values()))):
                first[name].lerp_(gradient, 0.1)
                second[name].lerp_(gradient.square(), 0.001)
                size = (second[name] / (1 - 0.999**step)).sqrt() + 1e-8
                weights[name].sub_(1e-3 * first[name] / (1 - 0.9**step) / size)
                average[name].lerp_(weights[name], 0.01)
    return list(weights.values())


def by_data(loss, updates, micro_steps=1):
    """backward(), and steps by way of `data`."""
    network, step = Network(), 0
    while step < updates * micro_steps:
        for (batch,) in DataLoader(TensorDataset(pictures()), 8, shuffle=True):
            (loss(network, batch) / micro_steps).backward()
            step += 1
            if step % micro_steps == 0:
                for weight in network.parameters():
                    weight.data -= 1e-2 * weight.grad
                    weight.grad = None
    return list(network.parameters())


def accumulated(loss, updates):
    return by_data(loss, updates, micro_steps=2)


STYLES = [functional, by_data, accumulated]


def watched(style, loss, updates=22):
    torch.manual_seed(0)
    doctor = Doctor()
    with doctor.install():
        weights = style(loss, updates)
    assert doctor.session.failure is None
    return [one.code for one in doctor.findings()], described(doctor.seen), weights


@pytest.mark.parametrize("style", STYLES)
def test_a_healthy_one_is_judged_and_trains_to_the_same_bits(style):
    found, said, weights = watched(style, loss_of)
    assert found == []
    assert "variance-preserving path, epsilon, errors weighed equally" in said and "by the script itself" in said
    torch.manual_seed(0)
    assert all(torch.equal(one, other) for one, other in zip(weights, style(loss_of, 22)))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        ({"noise_of": lambda x0: torch.rand_like(x0)}, "noise"),
        ({"noise_of": lambda x0: torch.randn_like(x0[:1]).expand_as(x0)}, "noise"),
        ({"target_of": lambda x0, noise: noise + 0.5 * x0}, "target"),
        ({"told": lambda t: torch.zeros_like(t)}, "timestep"),
    ],
)
def test_faults_of_its_passes_are_named(style, fault, stage):
    found, _, _ = watched(style, lambda network, x0: loss_of(network, x0, **fault))
    assert found and found[0].startswith(stage)


def test_a_penalty_of_a_gradient_is_no_update():
    def loss(network, x0):
        weights = list(network.parameters())
        value = loss_of(network, x0)
        return value + 1e-3 * sum(g.square().sum() for g in torch.autograd.grad(value, weights, create_graph=True))

    found, said, _ = watched(by_data, loss)
    assert said.startswith("23 updates of Network") and found == []  # of three passes over the images


def test_a_network_that_writes_to_its_weights_in_each_pass_has_its_optimizer():
    """As EDM2's, before the first step of an update of several micro steps."""

    class Normalized(Network):
        def forward(self, x, t):
            with torch.no_grad():
                self.first.weight.copy_(self.first.weight / self.first.weight.flatten(1).norm(dim=1)[:, None, None, None])
            return super().forward(x, t)

    def style(loss, updates):
        network = Normalized()
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        for step in range(1, 8 * updates + 1):
            (loss(network, pictures()[torch.randint(0, 64, (8,))]) / 8).backward()
            if step % 8 == 0:
                optimizer.step()
                optimizer.zero_grad()

    found, said, _ = watched(style, loss_of)
    assert said.startswith("22 updates of Normalized") and "; Adam" in said
    assert found == []


@pytest.mark.parametrize(("kept", "codes"), [(0.0, []), (1.0, ["gradient-left-over"])])
def test_gradients_that_were_asked_for_and_are_laid_beside_their_weights_by_hand(kept, codes):
    """They stand there when the next update begins; what counts is whether they come into its own."""

    def style(loss, updates):
        network = Network()
        weights = list(network.parameters())
        optimizer = torch.optim.Adam(weights, 1e-3)
        for _ in range(updates):
            value = loss(network, pictures()[torch.randint(0, 64, (8,))])
            for weight, gradient in zip(weights, torch.autograd.grad(value, weights)):
                weight.grad = gradient if weight.grad is None else gradient + kept * weight.grad
            optimizer.step()

    assert watched(style, loss_of, 5)[0] == codes


def test_gradients_of_one_number_are_those_of_their_update():
    """Those of two updates are multiples of each other, whatever stood there when the second one began."""

    class Gated(Network):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x, t):
            return self.gate * super().forward(x, t)

    def style(loss, updates):
        network = Gated()
        optimizer = torch.optim.SGD(network.parameters(), 1e-5)
        for _ in range(updates):
            optimizer.zero_grad()
            loss(network, pictures()[torch.randint(0, 64, (8,))]).backward()
            optimizer.step()

    assert "gradient-left-over" not in watched(style, loss_of, 8)[0]


def test_one_that_draws_nothing_by_torch_is_not_judged():
    drawn = torch.randn(64, 3, 8, 8).numpy()

    def loss(network, x0):
        noise, t = torch.from_numpy(drawn[: len(x0)]), torch.arange(len(x0)) * 100
        return mse_loss(network(column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise, t), noise)

    def style(loss, updates):
        network, images = Network(), pictures()
        for step in range(updates):
            loss(network, images[8 * (step % 8) : 8 * (step % 8) + 8]).backward()
            for weight in network.parameters():
                weight.data -= 1e-2 * weight.grad
                weight.grad = None

    found, said, _ = watched(style, loss)
    assert found == [] and "nothing was judged" in said


def given_to_an_optimizer(loss, updates, micro_steps=1):
    """Gradients that are asked for, summed up by the script, and given to an optimizer of torch."""
    network, images = Network(), pictures()
    weights, optimizer = list(network.parameters()), torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(updates):
        sums = [torch.zeros_like(weight) for weight in weights]
        for _ in range(micro_steps):
            value = loss(network, images[torch.randint(0, len(images), (8,))]) / micro_steps
            sums = [one + new for one, new in zip(sums, torch.autograd.grad(value, weights))]
        for weight, gradient in zip(weights, sums):
            weight.grad = gradient
        optimizer.step()
    return weights


def in_half(loss, updates):
    """The network computes in bfloat16; the optimizer has its weights in full precision, which are copied there."""
    network = Network().to(torch.bfloat16)
    masters = [weight.detach().float().clone() for weight in network.parameters()]
    optimizer = torch.optim.Adam(masters, 1e-3)
    average = [master.clone() for master in masters]
    for batch in (pictures()[torch.randint(0, 24, (8,))] for _ in range(updates)):
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss(network, batch).backward()
        for master, weight in zip(masters, network.parameters()):
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for one, master, weight in zip(average, masters, network.parameters()):
                weight.copy_(master)
                one.lerp_(master, 0.01)
    return masters


def accumulated_and_given(loss, updates):
    return given_to_an_optimizer(loss, updates, micro_steps=2)


@pytest.mark.parametrize("style", [given_to_an_optimizer, accumulated_and_given, in_half])
@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({}, ""),
        ({"target_of": lambda x0, noise: x0 + noise}, "target"),
        ({"noise_of": lambda x0: torch.randn_like(x0[:1]).expand_as(x0)}, "noise"),
        ({"told": torch.zeros_like}, "timestep"),
    ],
)
def test_gradients_and_weights_may_stand_elsewhere(style, change, stage):
    found, said, _ = watched(style, lambda network, x0: loss_of(network, x0, **change))
    assert [words.stage(code) for code in found[:1]] == [stage] * bool(stage)
    assert "Adam" in said


def test_a_sum_that_keeps_its_last_part_alone_is_named():
    def forgetful(loss, updates):
        network, images = Network(), pictures()
        weights, optimizer = list(network.parameters()), torch.optim.Adam(network.parameters(), 1e-3)
        for _ in range(updates):
            for _ in range(2):
                gradients = torch.autograd.grad(loss(network, images[torch.randint(0, len(images), (8,))]), weights)
            for weight, gradient in zip(weights, gradients):
                weight.grad = gradient
            optimizer.step()
        return weights

    assert watched(forgetful, loss_of)[0] == ["gradient-cleared-between"]


def test_masters_that_are_not_copied_are_named():
    def forgotten(loss, updates):
        network = Network()
        optimizer = torch.optim.Adam([weight.detach().clone() for weight in network.parameters()], 1e-3)
        for _ in range(updates):
            loss(network, pictures()[:8]).backward()
            for group, weight in zip(optimizer.param_groups[0]["params"], network.parameters()):
                group.grad = weight.grad.clone()
            optimizer.step()
            network.zero_grad()
        return []

    assert "optimizer-of-a-copy" in watched(forgotten, loss_of)[0]
