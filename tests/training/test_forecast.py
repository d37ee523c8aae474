from types import SimpleNamespace

import pytest
from diffusers import UNet2DModel

from models.edm2_unet import PRESETS, EDM2UNet
from utils.options.presets import NETWORKS, smaller_preset
from utils.training.forecast import Forecast


def said_by(
    monkeypatch,
    seconds_per_update: float,
    *,
    device: str = "cpu",
    resolution: int = 64,
    parameters: int = 113_700_000,
    script: str = "train_ddpm",
):
    now, said = 0.0, []
    monkeypatch.setattr("time.monotonic", lambda: now)
    run = SimpleNamespace(
        accelerator=SimpleNamespace(device=SimpleNamespace(type=device)),
        options=SimpleNamespace(script=script, resolution=resolution),
        length=SimpleNamespace(max_train_steps=200),
        state=SimpleNamespace(step=0),
        facts={"parameters": parameters},
        print_line=said.append,
    )
    forecast = Forecast(run)
    forecast.begin()
    for slowness in (3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):  # the first update has more to do
        now += slowness * seconds_per_update
        run.state.step += 1
        forecast.after_update()
    return said


def test_a_large_network_on_a_cpu_is_warned_of_at_once_and_with_the_time_when_that_is_known(monkeypatch):
    advice = "Try: --model_preset small64, which has 3.8 M parameters and is faster"
    size = "warning: this network has 113.7 M parameters, and an update takes many seconds on a CPU. "
    time = "warning: an update takes 24 s on this CPU, so the 198 updates to come take about 1.3 hours. "
    assert said_by(monkeypatch, 24.0) == [size + advice, time + advice]
    assert said_by(monkeypatch, 1.0) == [size + advice]
    assert said_by(monkeypatch, 24.0, parameters=19_000_000) == [time + advice]
    assert "--model_preset small64, which has 4.4 M parameters" in said_by(monkeypatch, 1.0, script="train_edm2")[0]


@pytest.mark.parametrize(
    "given",
    [{"seconds_per_update": 1.0, "parameters": 700_000}, {"seconds_per_update": 30.0, "device": "cuda"}],
    ids=["quick", "on a GPU"],
)
def test_nothing_is_said_of_other_runs(monkeypatch, given):
    assert said_by(monkeypatch, **given) == []


def test_a_network_that_is_small_already_has_other_advice(monkeypatch):
    (line,) = said_by(monkeypatch, 30.0, parameters=2_000_000)
    assert line.endswith("Try: set fewer --max_train_steps, or train on a GPU")


@pytest.mark.parametrize(("resolution", "name"), [(32, "small32"), (64, "small64"), (256, "small64"), (50, None)])
def test_the_preset_that_is_named_has_the_size_that_is_told(resolution, name):
    for script, network_class, presets in (("train_ddpm", UNet2DModel, NETWORKS), ("train_edm2", EDM2UNet, PRESETS)):
        smaller = smaller_preset(script, resolution, 35_700_000)
        if name is None:
            assert smaller is None
            continue
        network = network_class(sample_size=int(name[5:]), in_channels=3, out_channels=3, **presets[name])
        assert smaller == (name, sum(parameter.numel() for parameter in network.parameters()))
