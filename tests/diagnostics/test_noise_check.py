"""The noise that a network is shown, against noise that is known because it was put there."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from utils.diagnostics.dynamics import Dynamics
from utils.diagnostics.finding import Finding
from utils.diagnostics.noise_check import FIGURES, noise_figures
from utils.diagnostics.rules.process import noise_wrong, timestep_mismatch
from utils.diffusion.ddpm import describe_schedule, make_noise_scheduler
from utils.optim.clipping import Gradients
from utils.runs.record import RunRecord

SHAPE = (16, 3, 16, 16)
CLEAN = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1
TIMESTEPS = torch.arange(16) * 60 + 30


def drawn(seed: int = 1) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def figures(noise, told=TIMESTEPS, earlier=None, schedule="linear") -> dict[str, float]:
    scheduler = make_noise_scheduler(beta_schedule=schedule)
    values, _ = noise_figures(CLEAN, scheduler.add_noise(CLEAN, noise, TIMESTEPS), told, earlier)
    return dict(zip(FIGURES, values.tolist()))


@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
def test_independent_normal_noise(schedule):
    found = figures(drawn(), earlier=drawn(2)[0].flatten(), schedule=schedule)
    assert found["variance"] == pytest.approx(1, abs=0.05) and found["kurtosis"] == pytest.approx(3, abs=0.1)
    assert max(abs(found[name]) for name in ("between_images", "within_images", "repeated")) < 0.1
    assert found["timestep_order"] > 0.9 and found["timestep_mean"] == TIMESTEPS.float().mean()


def images_of(kind: str, generator: torch.Generator) -> torch.Tensor:
    """Sixteen images that tell little of the gain."""
    if kind.startswith("spread"):
        _, spread, side, channels = kind.split()
        return float(spread) * torch.randn(16, int(channels), int(side), int(side), generator=generator)
    images = torch.rand(16, 1, 16, 16, generator=generator) * 2 - 1
    if kind == "blob on gray":
        images[:, :, :, :], images[:, :, 6:9, 6:9] = 0.004, 0.9
    elif kind == "one blank":
        images[5] = 0.0
    elif kind == "a tenth nearly empty":
        images[torch.rand(16, generator=generator) < 0.1] *= 1e-3
    return images


@pytest.mark.parametrize(
    "kind", ["spread 0.05 16 1", "spread 0.02 32 1", "spread 0.02 32 3", "blob on gray", "one blank", "a tenth nearly empty"]
)
@pytest.mark.parametrize("micro_batch", [1, 2, 16])
def test_gray_and_empty_images_are_no_false_alarm(kind, micro_batch):
    """Their gain is known badly, which must not look like wrong noise or wrong timesteps."""
    generator, history = torch.Generator().manual_seed(6), []
    for step in range(1, 9):  # reports
        clean = images_of(kind, generator)
        noise, timesteps = torch.randn(clean.shape, generator=generator), torch.randint(1000, (16,), generator=generator)
        noisy = make_noise_scheduler().add_noise(clean, noise, timesteps)
        parts = zip(clean.split(micro_batch), noisy.split(micro_batch), timesteps.split(micro_batch))
        values = torch.stack([noise_figures(*part, None)[0] for part in parts]).nanmean(0)  # as `Dynamics` has it
        history.append({"step": step} | {f"noise/{name}": value for name, value in zip(FIGURES, values.tolist())})
    schedule = {"step": 0, "schedule": describe_schedule(make_noise_scheduler())}
    record = RunRecord(Path("run"), history=[schedule, *history])
    given = [*noise_wrong(record), *timestep_mismatch(record)]
    assert [item for item in given if isinstance(item, Finding)] == [] and "noise-wrong" in given


def test_a_blank_image_hides_no_fault_of_the_others():
    clean, told = CLEAN.clone(), 999 - TIMESTEPS
    clean[3] = 0.0
    values, _ = noise_figures(clean, make_noise_scheduler().add_noise(clean, 0.5 * drawn(), TIMESTEPS), told, None)
    found = dict(zip(FIGURES, values.tolist()))
    assert found["variance"] == pytest.approx(0.25, rel=0.05) and found["timestep_order"] < -0.9


def test_each_figure_tells_its_fault():
    assert figures(0.5 * drawn())["variance"] == pytest.approx(0.25, rel=0.05)
    uniform = torch.rand(SHAPE, generator=torch.Generator().manual_seed(3)) * 2 - 1
    assert figures(uniform)["variance"] == pytest.approx(1 / 3, rel=0.1)
    assert figures(uniform)["kurtosis"] == pytest.approx(1.8, rel=0.05)  # 9 / 5
    assert figures(drawn()[:1].expand(SHAPE))["between_images"] == pytest.approx(1, abs=0.05)
    assert figures(drawn()[:, :1].expand(SHAPE))["within_images"] == pytest.approx(1, abs=0.05)  # one for all channels
    assert figures(drawn()[:, :, :1].expand(SHAPE))["within_images"] == pytest.approx(1, abs=0.05)
    assert figures(drawn(), earlier=drawn()[0].flatten())["repeated"] == pytest.approx(1, abs=0.05)
    assert figures(drawn(), told=999 - TIMESTEPS)["timestep_order"] < -0.9
    assert (
        abs(figures(drawn(), told=TIMESTEPS[torch.randperm(16, generator=torch.Generator().manual_seed(5))])["timestep_order"])
        < 0.5
    )


def test_what_cannot_be_told_is_unknown():
    values, first = noise_figures(CLEAN[:1], drawn()[:1], TIMESTEPS[:1], None)
    unknown = {name for name, value in zip(FIGURES, values.tolist()) if math.isnan(value)}
    assert unknown == {"between_images", "repeated", "timestep_order"} and first.square().mean() == pytest.approx(1, rel=1e-5)
    assert math.isnan(figures(drawn(), told=torch.full((16,), 7))["timestep_order"])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, noisy_images, timesteps):
        return self.layer(noisy_images)


def report_of_an_update(clears: bool, checks_noise: bool = True) -> dict[str, float]:
    """The figures of the second update, with the same noise in both."""
    network = Network()
    dynamics = Dynamics(network, checks_noise=checks_noise)
    noisy_images = make_noise_scheduler().add_noise(CLEAN, drawn(), TIMESTEPS)
    for _ in range(2):
        dynamics.begin(True)
        dynamics.see_images(CLEAN)
        network(noisy_images, TIMESTEPS).square().mean().backward()
        dynamics.before_step()
        norms = torch.stack([p.grad.norm() for p in network.parameters()])
        dynamics.end(Gradients(norms.norm(), torch.tensor(True), norms, None))
        if clears:
            network.zero_grad()
    return dynamics.report()[0] | {"norm": norms.norm().item()}


def test_noise_is_looked_at_where_the_network_sees_it():
    found = report_of_an_update(clears=True)
    assert found["noise/repeated"] == pytest.approx(1, rel=1e-5) and found["noise/variance"] == pytest.approx(1, abs=0.05)
    assert found["gradients/left_over"] == 0
    assert not any(name.startswith("noise/") for name in report_of_an_update(clears=True, checks_noise=False))


def test_gradients_that_the_update_before_left_are_seen():
    found = report_of_an_update(clears=False)
    assert found["gradients/left_over"] == pytest.approx(found["norm"] / 2, rel=1e-5)  # the same gradient twice
