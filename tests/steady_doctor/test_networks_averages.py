"""Healthy loops of different styles, and their faults: the network, its gradients and rate, and averages of its weights."""

import copy

import pytest
import torch
from small_loops import C, Network, T, column, pictures, train, vp
from torch import nn
from torch.nn.functional import mse_loss

from steady_doctor.doctor import Doctor


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


@pytest.mark.parametrize(("keep", "codes"), [(0.95, []), (0.0, []), (0.05, ["ema-exchanged"])])
def test_a_teacher_is_an_average_or_a_copy(keep, codes):
    network = Twins()
    teacher = copy.deepcopy(network).requires_grad_(False)

    def loss_of(x0):
        t, noise = torch.randint(1, 80, (len(x0),)), torch.randn_like(x0)
        return mse_loss(network(x0 + column(t) * noise, t), teacher(x0 + column(t - 1) * noise, t - 1))

    @torch.no_grad()
    def mix():
        for old, new in zip(teacher.parameters(), network.parameters()):
            old.mul_(keep).add_(new, alpha=1 - keep)

    assert train(network, loss_of, updates=24, after=mix)[0] == codes


def test_an_average_that_is_copied_from_the_weights_to_the_weights():
    network = Network()
    codes, _ = train(network, vp(network), after=lambda: network.load_state_dict(network.state_dict()))
    assert codes == ["ema-is-the-network"]
    seldom, of_one = iter(range(99)), lambda: network.last.bias.data.copy_(network.last.bias.data)
    assert not train(network, vp(network), after=of_one)[0]
    after = lambda: next(seldom) == 3 and network.load_state_dict(network.state_dict())  # noqa: E731
    assert not train(network, vp(network), after=after)[0]


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


def frozen_copy(network):
    return copy.deepcopy(network).requires_grad_(False)


@pytest.mark.parametrize(
    ("averaged", "codes", "words"),
    [
        (copy.deepcopy, [], "averages of 0.9"),
        (frozen_copy, [], "averages of 0.9"),
        (lambda network: network, ["ema-is-the-network"], ""),
    ],
)
def test_an_average_that_is_made_anew_in_each_update(averaged, codes, words):
    network = Network()
    average = averaged(network)

    def after():
        for old, new in zip(average.parameters(), network.parameters()):
            old.data = old.data * 0.9 + (1 - 0.9) * new.data

    found, said = train(network, vp(network), after=after)
    assert found == codes and said.endswith(words)


def _add(weight):
    weight.add_(1e-4 * torch.randn(weight.shape))


def _set(weight):
    weight.data = 0.999 * weight.data + 1e-4 * torch.randn(weight.shape)


def _shrink(weight):
    weight.mul_(0.999).add_(1e-4 * torch.randn_like(weight))


@pytest.mark.parametrize("disturb", [_add, _set, _shrink])
def test_noise_on_the_weights_is_no_noise_on_the_image_and_no_average(disturb):
    """Langevin's dynamics; shrink and perturb."""
    network = Network()

    def after():
        with torch.no_grad():
            for weight in network.parameters():
                disturb(weight)

    found, said = train(network, vp(network), after=after)
    assert found == ["state-weights-written"] and "variance-preserving path, epsilon" in said


@pytest.mark.parametrize(
    "of",
    [
        lambda w: w * 0.1 + w.detach() * 0.9,  # a tenth of the gradient
        lambda w: w + (w.clamp(-1, 1) - w).detach(),  # straight through
        lambda w: 0.5 * w + 0.5 * w.transpose(2, 3).transpose(2, 3),
    ],
)
def test_a_network_that_makes_a_weight_of_itself_is_no_average(of):
    class Shrunk(Network):
        def forward(self, x, t):
            hidden = torch.relu(nn.functional.conv2d(x, of(self.first.weight), padding=1) + self.embedding(t))
            return self.last(hidden)

    network = Shrunk()
    assert "ema-is-the-network" not in train(network, vp(network))[0]


def test_a_high_rate_of_large_weights_that_are_normalized_is_right():
    assert train(network := OfUnitWeights(), vp(network), rate=0.02)[0] == []
    assert "rate-high" in train(network := Network(), vp(network), rate=0.02)[0]


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


def test_a_frozen_average_inside_the_network_is_a_teacher_and_no_part_that_nobody_trains():
    network = Network()
    network.teacher = copy.deepcopy(network.first).requires_grad_(False)
    assert train(network, vp(network))[0] == []


def test_the_average_of_a_first_training_is_none_of_a_second_one_that_begins_as_it():
    doctor, networks = Doctor(), [Network()]
    with doctor.install():
        for has_average in (True, False):
            network = networks[-1]
            average = copy.deepcopy(network).requires_grad_(False)
            optimizer, loss_of = torch.optim.Adam(network.parameters(), 1e-3), vp(network)
            for _ in range(30):
                optimizer.zero_grad()
                loss_of(pictures(16)).backward()
                optimizer.step()
                for old, new in zip(average.parameters(), network.parameters()) if has_average else ():
                    old.lerp_(new.detach(), 0.01)
            networks += [average, copy.deepcopy(average).requires_grad_(True)] if has_average else []
    assert [one.code for one in doctor.findings(ended=True)] == []
