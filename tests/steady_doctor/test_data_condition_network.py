"""Laws of data, conditions, network and ranks: each finds its fault in a small loop, and is silent where it is right."""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from steady_doctor.doctor import Doctor
from steady_doctor.found import Found
from steady_doctor.identify.rows import SEVERAL, UNKNOWN, origins
from steady_doctor.laws import ranks
from steady_doctor.record.loads import wraps
from steady_doctor.record.ranks import in_parts
from steady_doctor.record.tape import Tape
from steady_doctor.seen import Seen
from steady_doctor.words import severity

B, CLASSES, SIZE = 8, 4, 8
ALPHA_BAR = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), dim=0)


class Network(nn.Module):
    def __init__(self, **own):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.time, self.classes = nn.Linear(1, 16), nn.Embedding(CLASSES + 1, 16)
        self.between = own.get("between", nn.Identity())
        self.of_level, self.of_class = own.get("of_level", nn.Identity()), own.get("of_class", nn.Identity())

    def forward(self, x, t, y):
        told = self.of_level(self.time(t.float()[:, None] / 1000)) + self.of_class(self.classes(y))
        hidden = self.between(F.silu(self.first(x) + told[:, :, None, None]))
        return self.last(F.silu(self.middle(hidden)))


class Times(nn.Module):
    def __init__(self, do):
        super().__init__()
        self.forward = do


def pictures(count=32):
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(0, 256, (count, 3, 2, 2), generator=generator)
    return F.interpolate(coarse.float(), scale_factor=4, mode="nearest").to(torch.uint8)


def dropped(y):
    return torch.where(torch.rand(len(y)) < 0.2, CLASSES, y)


def found(
    image=lambda x: x,  # of a batch from -1 to 1
    label=dropped,
    network=None,
    batches=None,  # gives images in bytes, and labels
    prepare=lambda network: None,
    every=lambda step, network: None,
    noised=lambda a, x0, noise: a.sqrt() * x0 + (1 - a).sqrt() * noise,
    before_step=lambda optimizer: None,
    updates=14,
) -> set[str]:
    """The codes that are found in a loop, but those for information."""
    torch.manual_seed(0)
    images, labels = pictures(), torch.arange(32) * 7 % 31 % CLASSES
    network = network or Network()
    prepare(network)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    doctor = Doctor()
    with doctor.install():
        for step in range(updates):
            if batches is None:
                chosen = torch.randint(0, len(images), (B,))
                x0, y = images[chosen], labels[chosen]
            else:
                x0, y = next(batches)
            every(step, network)
            x0 = image(x0.float() / 127.5 - 1)
            t = torch.randint(0, 1000, (len(x0),))
            a, noise = ALPHA_BAR[t].reshape(-1, 1, 1, 1), torch.randn_like(x0)
            output = network(noised(a, x0, noise), t, label(y))
            optimizer.zero_grad()
            F.mse_loss(output.float(), noise).backward()
            before_step(optimizer)
            optimizer.step()
    assert doctor.session.failure is None
    return {one.code for one in doctor.findings(True) if severity(one.code) != "info"}


class Pictures(Dataset):
    def __init__(self, change=lambda image: image):
        self.images, self.change = pictures(), change

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.change(self.images[index]), index * 7 % 31 % CLASSES


def endless(change=lambda image: image, sampler=None, shuffle=True, keep=False):
    loader = DataLoader(Pictures(change), B, shuffle=shuffle and sampler is None, sampler=sampler)
    kept = list(loader) if keep else loader
    while True:
        yield from kept


def mixed(image):
    return image.permute(1, 2, 0).contiguous().view(image.shape)


def some_flipped(image):
    return image.flip(0) if torch.rand(()) < 0.5 else image


def darker_in_place(image):
    return image.copy_((image * 0.8).byte())


def brighter(image):
    return image + torch.full_like(image, 90)


def encoder(mode):
    network = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).train(mode)
    return torch.no_grad()(lambda x: network(x).clamp(-1, 1))


DATA = {
    "bytes": ({"image": lambda x: (x + 1) * 127.5}, "data-bytes"),
    "unsigned": ({"image": lambda x: (x + 1) / 2}, "data-unsigned"),
    "1 not taken off": ({"image": lambda x: x + 1 + (1 - x.max())}, "data-unsigned"),
    "halved": ({"image": lambda x: x / 2}, "data-halved"),
    "nearly one": ({"image": lambda x: (x + 1) / 255 - 1}, "data-nearly-one"),
    "one image": ({"image": lambda x: x[:1].expand_as(x)}, "data-one-image"),
    "mixed while loading": ({"batches": lambda: endless(mixed)}, "data-reshaped"),
    "flipped while loading": ({"batches": lambda: endless(some_flipped)}, "data-colors-flipped"),
    "wrapped while loading": ({"batches": lambda: endless(brighter)}, "data-wrapped"),
    "few rows": ({"batches": lambda: endless(sampler=torch.utils.data.SubsetRandomSampler(range(B)))}, "data-same-batch"),
    "written to": ({"batches": lambda: endless(darker_in_place)}, "data-changed"),
    "batches kept": ({"batches": lambda: endless(keep=True)}, "data-kept-batches"),
    "not shuffled": ({"batches": lambda: endless(shuffle=False)}, "data-not-shuffled"),
    "turned while loading": ({"batches": lambda: endless(lambda image: image.flip(-1))}, ""),
    "all flipped": ({"batches": lambda: endless(lambda image: image.flip(0))}, ""),
    "loader": ({"batches": endless}, ""),
    "faint": ({"image": lambda x: x * 0.9}, ""),
    "mirrored": ({"image": lambda x: torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)}, ""),
    "plain": ({}, ""),
}
CONDITION = {
    "shuffled": ({"label": lambda y: y[torch.randperm(len(y))]}, "condition-other-rows"),
    "of the first": ({"label": lambda y: y[:1].expand_as(y)}, "condition-one-row"),
    "always dropped": ({"label": lambda y: torch.where(torch.rand(len(y)) < 2, CLASSES, y)}, "condition-always-same"),
    "mostly dropped": ({"label": lambda y: torch.where(torch.rand(len(y)) < 0.2, y, CLASSES)}, "condition-dropped"),
    "mostly dropped by a mask": (
        {"label": lambda y: torch.where(torch.bernoulli(torch.zeros_like(y.float()) + 0.8) > 0, CLASSES, y)},
        "condition-dropped",
    ),
    "dropped to class 0": ({"label": lambda y: torch.where(torch.rand(len(y)) < 0.3, 0, y)}, "condition-null"),
    "dropped in vain": ({"label": lambda y: (dropped(y), y)[1]}, "condition-dropped-in-vain"),
    "sorted": ({"label": lambda y: y.sort().values}, "condition-sorted"),
    "no effect": ({"network": lambda: Network(of_class=Times(lambda x: 0 * x))}, "condition-ignored"),
    "read and left": ({"network": lambda: Network(of_class=Times(lambda x: torch.zeros(16)))}, "condition-ignored"),
    "never dropped": ({"label": lambda y: y}, ""),
    "other loader, same order": ({"batches": endless, "label": lambda y: y}, ""),
}
NETWORK = {
    "encoder in training mode": ({"image": encoder(True)}, "network-encoder-mode"),
    "encoder": ({"image": encoder(False)}, ""),
    "level without effect": ({"network": lambda: Network(of_level=Times(lambda x: x.detach()))}, "network-level-ignored"),
    "evaluation mode": (
        {"network": lambda: Network(between=nn.Dropout(0.1)), "every": lambda step, network: network.train(step < 6)},
        "network-evaluation-mode",
    ),
    "frozen": ({"prepare": lambda network: network.first.requires_grad_(False)}, "network-frozen"),
    "two layers of zeros": (
        {"prepare": lambda network: [nn.init.zeros_(p) for part in (network.middle, network.last) for p in part.parameters()]},
        "network-dead",
    ),
    "not finite": ({"network": lambda: Network(between=Times(lambda x: x * float("inf")))}, "network-not-finite"),
    "dropout": ({"network": lambda: Network(between=nn.Dropout(0.1))}, ""),
    "batch norm frozen on purpose": (
        {"network": lambda: Network(between=nn.BatchNorm2d(16)), "every": lambda step, network: network.between.eval()},
        "",
    ),
    "last layer of zeros": ({"prepare": lambda network: nn.init.zeros_(network.last.weight)}, ""),
    "loaded and frozen": (
        {"prepare": lambda network: nn.init.normal_(network.first.requires_grad_(False).weight, std=0.3)},
        "",
    ),
}
OWN = ("data-", "condition-", "network-", "ranks-")
LATE = {"few rows", "written to", "batches kept"} | {"no effect", "read and left"}  # after more than 6 updates
LATE |= {"level without effect", "evaluation mode", "two layers of zeros"}


@pytest.mark.parametrize("name", [*DATA, *CONDITION, *NETWORK])
def test_a_fault_is_found_and_nothing_where_it_is_right(name):
    options, code = (DATA | CONDITION | NETWORK)[name]
    options = {key: value() if key in ("network", "batches") else value for key, value in options.items()}
    codes = {one for one in found(**options, updates=6 if code and name not in LATE else 14) if one.startswith(OWN)}
    assert codes == set() if not code else code in codes


def test_a_gradient_that_is_cleared_says_nothing_of_the_network():
    assert found(before_step=lambda optimizer: optimizer.zero_grad()) == {"gradient-cleared-before-step"}


def origins_of(make, source):
    """The rows of `source` in `make(source)`."""
    with Tape([]) as tape:
        tape.known([source], "data")
        made = make(source)
    op = tape.op_of(made)
    return origins(tape, op, next(one for one in tape.sources(op.content) if one.kind == "data")).tolist()


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda x: 2 * x - 1, [0, 1, 2, 3, 4]),
        (lambda x: x.flip(0), [4, 3, 2, 1, 0]),
        (lambda x: x.roll(1, 0)[1:3], [0, 1]),
        (lambda x: x[2:3].expand(3, 2), [2, 2, 2]),
        (lambda x: torch.where(torch.tensor([[1], [0], [1], [1], [1]]) > 0, x, 0.0), [0, UNKNOWN, 2, 3, 4]),
        (lambda x: x + x.roll(1, 0), [SEVERAL] * 5),
    ],
)
def test_rows_are_followed(make, rows):
    assert origins_of(make, torch.arange(10.0).reshape(5, 2)) == rows


@pytest.mark.parametrize(
    ("name", "one", "other", "beyond"),
    [("add", 200, 56, True), ("add", 200, 55, False), ("sub", 3, 4, True), ("mul", 2, 128, True), ("mul", 2, 127, False)],
)
def test_bytes_that_begin_anew(name, one, other, beyond):
    image = torch.full((3, 2, 2), one, dtype=torch.uint8)
    assert wraps(name, image, other) == beyond
    assert not wraps(name, image.float(), other) and not wraps(name, image[0, 0], other)


def told(own_levels: float = 0.0, **values) -> list[Found]:
    """What the laws find of two processes of which each told these, at three updates. `own_levels`: of a script that
    declares what it does, whose main process had 8 noise levels from 0 to this; 0: it declares nothing."""
    seen = Seen(ranks={update: [dict(zip(values, one)) for one in zip(*values.values())] for update in (2, 3, 5)})
    one = types.SimpleNamespace(mixture=(), levels=torch.linspace(0, own_levels, 8))
    seen.steps = [types.SimpleNamespace(update=types.SimpleNamespace(number=2), passes=[one], micro_steps=[one])]
    seen.declared = () if own_levels else None
    return [one.code for law in ranks.LAWS for one in law(seen)]


def test_processes_are_compared():
    assert told(weights="aa", gradient="bb", noise="cd", images="ef") == []
    assert told(weights="ab", gradient="bc", noise="cd", images="ef") == ["ranks-gradient", "ranks-weights"]
    assert told(noise="cc", images="ef") == ["ranks-noise"] and told(images="ee") == ["ranks-images"]
    assert told(averages="ab") == ["ranks-averages"] and told(averages="aa") == []
    assert told(own_levels=1.0, levels="gg", noise="cd") == ["ranks-levels"]
    assert told(own_levels=1.0, levels="gh", noise="cd") == told(own_levels=0.0, levels="gg", noise="cd") == []


def test_weights_that_are_kept_in_parts_are_not_compared():
    whole, part = torch.zeros(2), types.SimpleNamespace(ds_id=3)
    assert not in_parts([whole]) and in_parts([whole, part])
