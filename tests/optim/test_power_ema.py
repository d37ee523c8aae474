"""Power-function EMA and its reconstruction, against numerical integration and averages computed directly."""

import os
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import same_bytes, slow_turns
from safetensors.torch import load_file, save_file
from scipy.integrate import quad
from test_ema import network
from torch import nn

import train_ddpm
from utils.core.errors import UserError
from utils.optim.ema import EMA
from utils.optim.power_ema import (
    PowerEMA,
    exponent_of_width,
    inner_products,
    make_ema,
    power_decay,
    reconstruction_weights,
)
from utils.options.flags import EMAOptions
from utils.runs.ema_snapshots import FOLDER, list_snapshots, reconstruct, save_snapshots
from utils.runs.state import TrainState
from utils.training.progress import ProgressBar


def profile(t, exponent: float, end: float):
    return (exponent + 1) * (t / end) ** exponent / end * (t <= end)


def test_the_exponent_of_a_width_gives_a_profile_of_that_standard_deviation_over_its_length():
    assert exponent_of_width(0.05) == pytest.approx(16.97, abs=0.005)  # published
    assert exponent_of_width(0.10) == pytest.approx(6.94, abs=0.005)
    for width, end in ((0.005, 1.0), (0.05, 1.0), (0.1, 3000.0), (0.285, 7.0)):
        exponent, points = exponent_of_width(width), [0.9 * end]
        mean = quad(lambda t: t * profile(t, exponent, end), 0, end, points=points)[0]  # noqa: B023
        square = quad(lambda t: t**2 * profile(t, exponent, end), 0, end, points=points)[0]  # noqa: B023
        assert width == pytest.approx((square - mean**2) ** 0.5 / end, rel=1e-5)
    for width in (0.0, -0.1, 0.2887, 5.0):
        with pytest.raises(UserError, match=r"between 0 and 0\.2887"):
            exponent_of_width(width)


def test_inner_products_against_numerical_integration():
    steps, exponents = [100, 250, 400], [16.97, 6.94, 2.5]
    actual = inner_products(steps, exponents, steps, exponents)
    for a in range(3):
        for b in range(3):
            shorter = min(steps[a], steps[b])
            product = quad(lambda t: profile(t, exponents[a], steps[a]) * profile(t, exponents[b], steps[b]), 0, shorter)  # noqa: B023
            assert actual[a, b] == pytest.approx(product[0], rel=1e-6)


def test_decay_gives_the_profile():
    """The weight that the average of n updates gives to update t, for the plain mean and for a power."""
    for exponent in (0.0, 6.94):
        weights = []
        for step in range(1, 2001):
            decay = power_decay(step, exponent)
            weights = [w * decay for w in weights] + [1 - decay] if step > 1 else [1.0]
        assert sum(weights) == pytest.approx(1.0)
        expected = [quad(profile, t - 1, t, (exponent, 2000.0))[0] for t in (500, 1000, 1999)]
        assert [weights[t - 1] for t in (500, 1000, 1999)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("step", "width"), [(400, 0.15), (400, 0.01), (415, 0.1), (40, 0.15)])
def test_error_of_the_profile_against_numerical_integration(step, width):
    """At a snapshot, for a width that is too narrow, between two snapshots, and from a single time."""
    steps, widths = zip(*((s, w) for s in range(40, step + 1, 40) for w in (0.05, 0.10)))
    weights, error = reconstruction_weights(steps, widths, step, width)
    t = (np.arange(400_000) + 0.5) * step / 400_000
    made = sum(x * profile(t, exponent_of_width(w), s) for x, s, w in zip(weights, steps, widths))
    wanted = profile(t, exponent_of_width(width), step)
    assert error == pytest.approx(np.sqrt(((made - wanted) ** 2).sum() / (wanted**2).sum()), rel=1e-3)


def walk(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        model[1].num_batches_tracked += 1


def tracked(model: nn.Module, updates: int, widths=(0.05, 0.10), skip=(), folder=None, every=10, dtype="fp32") -> PowerEMA:
    ema, decay_at = make_ema(model, EMAOptions(ema_type="power", ema_widths=list(widths)))
    for step in range(1, updates + 1):
        walk(model, step)
        ema.update(decay_at(step), torch.tensor(step not in skip))
        if folder is not None and step % every == 0:
            save_snapshots(ema, folder, step, fingerprint="abc", dtype=dtype)
    return ema


def test_several_widths_are_tracked_at_once_and_skipped_updates_change_none_of_them():
    ema = tracked(network(), 50, skip=(7, 50))
    for width in (0.05, 0.10):
        model, expected = network(), None
        for step in range(1, 51):
            walk(model, step)
            if step in (7, 50):
                continue
            decay = (1 - 1 / step) ** (exponent_of_width(width) + 1)
            weight = model[0].weight.detach().double()
            expected = weight if expected is None else decay * expected + (1 - decay) * weight
        torch.testing.assert_close(ema.averages[width].shadow["0.weight"].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_first_width_is_the_one_that_is_swapped_in_and_stored_under_the_model_s_names():
    model = network()
    ema = tracked(model, 30)
    state = ema.state_dict()
    assert model.state_dict().keys() <= state.keys() and "0.1/0.weight" in state
    average = state["0.weight"].clone()
    with ema.swapped_into_model():
        assert torch.equal(model[0].weight, average)


def test_state_comes_back_and_other_widths_are_refused(tmp_path):
    ema = tracked(network(), 30)
    save_file({name: tensor.contiguous() for name, tensor in ema.state_dict().items()}, tmp_path / "ema.safetensors")
    state = load_file(tmp_path / "ema.safetensors")
    other = PowerEMA(network(), (0.05, 0.10))
    other.load_state_dict(state)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in state.items())
    for widths, message in (((0.05, 0.2), r"0\.05 0\.1, not 0\.05 0\.2"), ((0.2, 0.1), r"0\.05 0\.1, not 0\.2 0\.1")):
        with pytest.raises(UserError, match=f"has --ema_widths {message}"):
            PowerEMA(network(), widths).load_state_dict(state)
    with pytest.raises(UserError, match=r"has --ema_widths none, not 0\.05"):
        PowerEMA(network(), (0.05,)).load_state_dict(EMA(network()).state_dict())
    with pytest.raises(UserError, match="once"):
        PowerEMA(network(), (0.05, 0.05))


def test_exponential_ema_is_as_before():
    ema, decay_at = make_ema(network(), EMAOptions(ema_max_decay=0.9, ema_inv_gamma=2.0, ema_power=0.6))
    assert type(ema) is EMA
    assert decay_at(10) == pytest.approx(1 - (1 + 9 / 2) ** -0.6) and decay_at(100_000) == 0.9


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("fp16", 1e-3)])
def test_snapshots_on_disk_make_an_average_that_was_never_tracked(tmp_path, dtype, tolerance):
    tracked(network(), 400, folder=tmp_path, dtype=dtype)
    snapshots = list_snapshots(tmp_path)
    assert [(s.step, s.width) for s in snapshots] == [(step, w) for step in range(10, 401, 10) for w in (0.05, 0.1)]
    for snapshot in snapshots:
        tensors = load_file(snapshot.path)
        assert tensors["0.weight"].dtype == {"fp32": torch.float32, "fp16": torch.float16}[dtype]
        assert tensors["1.running_mean"].dtype == torch.float32  # a buffer
    for step in (200, 400):
        direct = tracked(network(), step, widths=(0.07,))
        made = reconstruct(snapshots, 0.07, step)
        assert made.keys() == direct.shadow.keys()
        for name in ("0.weight", "1.weight"):
            assert (made[name] - direct.shadow[name]).norm() < tolerance * direct.shadow[name].norm(), name
        assert made["1.num_batches_tracked"] == step
    assert torch.equal(reconstruct(snapshots, 0.07)["0.weight"], made["0.weight"])  # the end, where no step is given
    with pytest.raises(UserError, match="set a step from 10 to 400"):
        reconstruct(snapshots, 0.07, 5)


@pytest.mark.parametrize(
    ("step", "width", "message"),
    [
        (205, 0.07, r"step 205 lies between the snapshots at 200 and 210, take one of these"),
        (400, 0.01, r"would be wrong by 13 %\ntake a --width nearer to those that were tracked \(0\.05 and 0\.1\)"),
        (10, 0.15, r"from 2 snapshots: .* wrong by 25 %"),
    ],
)
def test_an_average_that_the_snapshots_do_not_add_up_to_is_refused(tmp_path, step, width, message):
    tracked(network(), 400, folder=tmp_path)
    with pytest.raises(UserError, match=message):
        reconstruct(list_snapshots(tmp_path), width, step)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    ema = tracked(network(), 20, folder=tmp_path)
    before = {s.path: s.path.read_bytes() for s in list_snapshots(tmp_path)}

    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("utils.runs.ema_snapshots.save_file", half)
    with pytest.raises(OSError):
        save_snapshots(ema, tmp_path, 20, fingerprint="abc", dtype="fp32")
    assert [s.path for s in list_snapshots(tmp_path)] == list(before)
    assert all(same_bytes(path, content) for path, content in before.items())


def test_what_does_not_belong_together_is_named(tmp_path):
    with pytest.raises(UserError, match="no EMA snapshots\ntrain with --ema_type power"):
        list_snapshots(tmp_path)
    ema = tracked(network(), 20, folder=tmp_path)
    save_snapshots(ema, tmp_path, 30, fingerprint="of another run", dtype="fp32")
    with pytest.raises(UserError, match="several runs"):
        list_snapshots(tmp_path)
    (tmp_path / FOLDER / "00000040-0.05.safetensors").write_bytes(b"not a snapshot at all")
    with pytest.raises(UserError, match=r"00000040-0\.05\.safetensors is damaged"):
        list_snapshots(tmp_path)


def test_runs_of_other_options_have_other_fingerprints():
    first, second = (TrainState(options={"seed": seed}).fingerprint for seed in (0, 1))
    assert first != second and TrainState(options={"seed": 0}).fingerprint == first
    assert TrainState(options={"seed": 1}, fingerprint=first).fingerprint == first  # resumed with another option, as allowed


# ---- in a run


@pytest.mark.slow
def test_a_run_s_snapshots_survive_a_resume_and_are_the_same(train, tiny_flags, tmp_path):
    flags = [*tiny_flags, "--ema_type", "power", "--ema_snapshot_steps", "3", "--checkpointing_steps", "4"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert train([*flags, "--output_dir", whole]) == 0
    assert train([*flags, "--output_dir", resumed]) == 0
    (resumed / "checkpoint-8/MANIFEST.json").unlink()
    assert train([*flags, "--output_dir", resumed, "--resume_from_checkpoint", "latest"]) == 0
    snapshots = list_snapshots(resumed)
    assert [(s.step, s.width) for s in snapshots] == [(step, w) for step in (3, 6, 8) for w in (0.05, 0.1)]
    for snapshot in snapshots:
        assert same_bytes(snapshot.path, whole / FOLDER / snapshot.path.name)
    for file in ("model.safetensors", "ema.safetensors"):
        assert same_bytes(whole / "checkpoint-8" / file, resumed / "checkpoint-8" / file)
    exported, averaged = (
        load_file(resumed / p) for p in ("unet/diffusion_pytorch_model.safetensors", "checkpoint-8/ema.safetensors")
    )
    assert all(torch.equal(averaged[name], tensor) for name, tensor in exported.items())


def test_a_run_that_stops_early_takes_a_last_snapshot(train, tiny_flags, tmp_path):
    flags = [*tiny_flags, "--ema_type", "power", "--ema_snapshot_steps", "5", "--ema_snapshot_dtype", "fp32"]
    flags += ["--learning_rate", "1e-30", "--validation_images", "8", "--validation_steps", "3"]
    assert train([*flags, "--early_stopping_patience", "1", "--output_dir", tmp_path]) == 0
    snapshots = list_snapshots(tmp_path)
    assert [(s.step, s.width) for s in snapshots] == [(step, w) for step in (5, 6) for w in (0.05, 0.1)]
    saved, exported = (load_file(path) for path in (snapshots[2].path, tmp_path / "unet/diffusion_pytorch_model.safetensors"))
    assert all(torch.equal(saved[name], tensor) for name, tensor in exported.items())


@pytest.mark.parametrize("ending", ["signal", *slow_turns("gradients that are not finite")])
def test_a_run_that_can_go_on_takes_its_last_snapshot_when_it_is_ended(train, tiny_flags, tmp_path, monkeypatch, ending):
    """Until then it has those of a run that nobody stopped."""
    flags = [*tiny_flags, "--ema_type", "power", "--ema_snapshot_steps", "5", "--ema_snapshot_dtype", "fp32"]
    flags += ["--output_dir", tmp_path, "--lr_scheduler", "constant", "--max_bad_steps", "2"]
    update, made = ProgressBar.update, []

    def stop_after_six(bar: ProgressBar) -> None:
        made.append(update(bar))
        if len(made) == 6 and ending == "signal":
            os.kill(os.getpid(), signal.SIGTERM)

    def spoiled(loss: torch.Tensor) -> torch.Tensor:
        return loss * (float("nan") if len(made) >= 4 and ending != "signal" else 1.0)

    with monkeypatch.context() as during:
        during.setattr(ProgressBar, "update", stop_after_six)
        during.setattr(train_ddpm, "propagate_nonfinite", spoiled)
        assert train(flags) == (75 if ending == "signal" else 3)
    assert [s.step for s in list_snapshots(tmp_path)] == [5, 5]
    assert train([*flags, "--resume_from_checkpoint", "latest", "--max_train_steps", "6"]) == 0
    snapshots = list_snapshots(tmp_path)
    assert [(s.step, s.width) for s in snapshots] == [(step, w) for step in (5, 6) for w in (0.05, 0.1)]
    kept, made_of = load_file(tmp_path / "checkpoint-6/ema.safetensors"), reconstruct(snapshots, 0.05)
    for name, tensor in load_file(tmp_path / "unet/diffusion_pytorch_model.safetensors").items():
        assert torch.equal(kept[name], tensor)
        torch.testing.assert_close(made_of[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_snapshots_of_a_branch_that_was_left_are_gone_when_the_run_goes_on(train_script, script_flags, tmp_path):
    """Even where the new branch takes its own at other steps, or there is no checkpoint to go on from."""
    flags = [*script_flags, "--ema_type", "power", "--checkpointing_steps", "4", "--output_dir", tmp_path]
    assert train_script([*flags, "--ema_snapshot_steps", "3"]) == 0
    resume = [*flags, "--ema_snapshot_steps", "5", "--resume_from_checkpoint"]
    assert train_script([*resume, "checkpoint-4", "--max_train_steps", "6"]) == 0
    assert [s.step for s in list_snapshots(tmp_path)] == [3, 3, 5, 5, 6, 6]
    for checkpoint in tmp_path.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    (tmp_path / "exit_status").unlink()  # as a kill leaves it
    assert train_script([*resume, "latest", "--max_train_steps", "2"]) == 0
    assert [s.step for s in list_snapshots(tmp_path)] == [2, 2]
