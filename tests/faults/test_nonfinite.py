"""Losses and gradients that are not finite: nothing changes, the report names the culprit, a row of them ends the run."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import logged_scalars, same_bytes, slow_turns
from safetensors.torch import load_file

from benchmarks.shared.replace import replace_everywhere
from utils.core import randomness
from utils.diffusion.edm2 import training_noise_levels
from utils.diffusion.objective import Losses
from utils.optim.clipping import Gradients
from utils.optim.nonfinite import BadUpdates

ONE = SimpleNamespace(device=torch.device("cpu"), num_processes=1, scaler=None)
CHECKPOINT_FILES = ("model.safetensors", "ema.safetensors", "optimizer.bin")


def gradients(*norms: float, loss_scale: float | None = None) -> Gradients:
    norms = torch.tensor(norms)
    scale = None if loss_scale is None else torch.tensor(loss_scale)
    return Gradients(norms.norm(), torch.isfinite(norms.norm()), norms, scale)


def test_bad_updates_are_counted_and_the_first_is_kept():
    bad = BadUpdates(ONE, 2, skipped=2)
    for step, norm in enumerate((1.0, float("nan"), float("inf"), 1.0, float("nan"))):
        bad.add_losses(torch.tensor([float(step)]))
        bad.add_losses(torch.tensor([float(step) + 0.5]))
        bad.add(step, gradients(0.5, norm))
    counts = {"train/skipped_updates": 5, "train/bad_updates_in_a_row": 2}
    assert bad.report() == counts | {"train/first_skipped_update": 2}
    assert bad.first.step == 1
    assert bad.first.losses.tolist() == [1.0, 1.5]
    assert bad.first.norms.isfinite().tolist() == [True, False]
    for step in (5, 6):
        bad.add_losses(torch.tensor([1.0, 1.0]))
        bad.add(step, gradients(0.5, float("nan")))
    assert bad.report()["train/bad_updates_in_a_row"] == 3  # one before the report, two after it
    assert (bad.first.step, bad.totals()) == (5, (7, 0, 3))


def test_a_scaler_that_looks_for_its_scale_is_told_from_a_nan():
    inf, nan = float("inf"), float("nan")
    bad = BadUpdates(SimpleNamespace(**vars(ONE) | {"scaler": object()}), 1)
    cases = [  # loss, gradient, scale -> bad?
        (1.0, inf, 65536.0, False),  # the scale was too high
        (nan, nan, 32768.0, True),  # the loss itself is not finite
        (1.0, inf, 16384.0, False),  # between two bad ones: no end of the row
        (1.0, inf, 1.0, True),  # nothing is left to scale down
        (1.0, 1.0, 1.0, False),
    ]
    for step, (loss, norm, scale, _) in enumerate(cases):
        bad.add_losses(torch.tensor([loss]))
        bad.add(step, gradients(norm, loss_scale=scale))
    counts = {"train/skipped_updates": 2, "train/bad_updates_in_a_row": 2, "train/scaler_skips": 2}
    assert bad.report() == counts | {"train/first_skipped_update": 2}
    assert bad.first.step == 1


def test_a_nan_on_another_rank_is_no_overflow():
    other = SimpleNamespace(**vars(ONE) | {"scaler": object(), "num_processes": 2, "reduce": lambda flag, how: flag + 1})
    bad = BadUpdates(other, 1)
    bad.add_losses(torch.tensor([1.0]))
    bad.add(0, gradients(float("nan"), loss_scale=65536.0))
    assert bad.totals() == (1, 0, 1)


def assert_unchanged(before: Path, after: Path) -> None:
    """Weights, EMA and the optimizer's moments; its learning rate is the update count's."""
    for file in ("model.safetensors", "ema.safetensors"):
        assert same_bytes(before / file, after / file), file
    first, second = (torch.load(folder / "optimizer.bin", weights_only=True)["state"] for folder in (before, after))
    assert all(torch.equal(first[key][name], second[key][name]) for key in first for name in first[key])


class OfDDPM:
    """Where train_ddpm.py takes its network from, a part of it, and what tells its samples' noise levels apart."""

    factory, part, part_class = "utils.diffusion.unet.make_unet", "mid_block.resnets.0", "ResnetBlock2D"
    level, losses, trained_as = "timesteps", "utils.diffusion.ddpm.loss_per_sample", ""

    @staticmethod
    def levels(numbers: torch.Tensor) -> torch.Tensor:
        return randomness.integers(0, "timesteps", numbers, 1000)

    @staticmethod
    def shown(timesteps: torch.Tensor) -> torch.Tensor:
        """The noise levels of what the network is shown."""
        return timesteps

    @staticmethod
    def plus(losses: torch.Tensor, number: float):
        return losses + number


class OfEDM2:
    factory, part, part_class = "utils.diffusion.unet.make_edm2_unet", "decoder.0", "EDM2Block"
    level, losses, trained_as = "sigmas", "utils.diffusion.edm2.losses_per_sample", "unet."

    @staticmethod
    def levels(numbers: torch.Tensor) -> torch.Tensor:
        return training_noise_levels(0, numbers, -0.8, 1.6)

    @staticmethod
    def shown(c_noise: torch.Tensor) -> torch.Tensor:
        return (4.0 * torch.as_tensor(c_noise)).exp()

    @staticmethod
    def plus(losses: Losses, number: float):
        return losses._replace(trained=losses.trained + number)


@pytest.fixture
def trained(script):
    return {"train_ddpm.py": OfDDPM, "train_edm2.py": OfEDM2}[script]


@pytest.fixture(autouse=True)
def no_replays(monkeypatch):
    """Passes are counted here, and the look at the network would make more of them."""
    monkeypatch.setattr("utils.diagnostics.probe.affordable", lambda network, pixels: False)


def spoil(monkeypatch, trained, spoils):
    """Lets a part of the network give NaN for the samples [B] of which `spoils(call, noise levels)` is true; calls that train
    are counted."""
    module, factory = trained.factory.rsplit(".", 1)
    make, calls, seen = getattr(importlib.import_module(module), factory), [0], {}

    def spoiled_network(*arguments, **options):
        network = make(*arguments, **options)

        def note(module, inputs):
            seen["levels"], calls[0] = trained.shown(inputs[1]), calls[0] + torch.is_grad_enabled()

        def hook(module, inputs, output):
            if not torch.is_grad_enabled():  # samples are left alone
                return output
            chosen = spoils(calls[0], seen["levels"])
            return output.masked_fill(chosen[:, None, None, None], float("nan"))

        network.register_forward_pre_hook(note)
        network.get_submodule(trained.part).register_forward_hook(hook)
        return network

    replace_everywhere(trained.factory, spoiled_network, monkeypatch)


@pytest.mark.parametrize("accumulation", [1, *slow_turns(2)])
def test_one_bad_sample_changes_nothing_and_is_named(train_script, script_flags, trained, tmp_path, monkeypatch, accumulation):
    numbers = torch.arange(64)
    levels = trained.levels(numbers)
    culprit = 21  # of update 3, samples 16 to 23
    assert (levels == levels[culprit]).sum() == 1
    spoil(monkeypatch, trained, lambda call, level: torch.isclose(level, levels[culprit]))
    flags = [*script_flags, "--output_dir", tmp_path, "--checkpointing_steps", "1", "--logging_steps", "4"]
    split = ["--train_batch_size", 8 // accumulation, "--gradient_accumulation_steps", accumulation]
    assert train_script([*flags, *split]) == 0
    before, after, later = (tmp_path / f"checkpoint-{step}" for step in (2, 3, 4))
    assert_unchanged(before, after)
    with pytest.raises(AssertionError):
        assert_unchanged(after, later)
    assert logged_scalars(tmp_path, "train/skipped_updates") == {4: 1, 8: 1}
    report = json.loads((tmp_path / "nan_report/update-3/report.json").read_text())
    level = trained.level.removesuffix("s")
    assert [s["sample_number"] for s in report["bad_samples"]] == [culprit]
    assert report["bad_samples"][0][level] == pytest.approx(levels[culprit].item(), rel=1e-5)
    assert (report["bad_samples"][0]["loss"], report["bad_samples"][0]["loss_again"]) == ("nan", "nan")
    name = trained.trained_as + trained.part
    assert report["first_bad_module"] == {"name": name, "class": trained.part_class, "inputs_finite": True}
    assert report["bad_gradients"]["count"] > 0
    assert len(report["samples"]) == 8
    batch = load_file(tmp_path / "nan_report/update-3/rank0.safetensors")
    assert batch["sample_numbers"].tolist() == list(range(16, 24))
    # Drawn for other numbers of samples than here, so that logarithms and cosines may be rounded otherwise.
    torch.testing.assert_close(batch[trained.level], levels[16:24], rtol=1e-5, atol=0)
    noise = randomness.normal(0, "noise", numbers[16:24], (1, 16, 16))
    torch.testing.assert_close(batch["noise"], noise, rtol=1e-5, atol=1e-6)
    assert (tmp_path / "nan_report/update-3/rank0.png").exists()
    assert not list(tmp_path.glob("nan_report/update-[!3]"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--dropout", "0.2"], ["--spectral_norm"], ["--gradient_checkpointing"]], ids=str)
def test_the_report_leaves_the_training_as_it_was(train_script, script_flags, trained, tmp_path, monkeypatch, options):
    """Bad in update 3 alone, whatever is computed again: the same weights with a report at once and with one at the end."""
    if options == ["--spectral_norm"] and trained is OfEDM2:
        pytest.skip("EDM2 normalizes its weights in its own way")
    for name, logging_steps in (("often", 1), ("late", 8)):
        with monkeypatch.context() as patch:
            # Gradient checkpointing calls the part again for the backward pass; the network as a whole once per update.
            spoil(patch, trained, lambda call, level: torch.full_like(level, call == 3, dtype=torch.bool))
            flags = [*options, "--checkpointing_steps", "8", "--logging_steps", logging_steps]
            assert train_script([*script_flags, *flags, "--output_dir", tmp_path / name]) == 0
        report = json.loads((tmp_path / name / "nan_report/update-3/report.json").read_text())
        assert report["bad_samples"][0]["loss"] == "nan" and report["first_bad_module"] is None  # not when computed again
    for file in CHECKPOINT_FILES:
        often, late = (tmp_path / name / "checkpoint-8" / file for name in ("often", "late"))
        assert same_bytes(often, late), file


def test_a_row_that_has_ended_does_not_end_the_run(train_script, script_flags, trained, tmp_path, monkeypatch):
    spoil(monkeypatch, trained, lambda call, level: torch.full_like(level, 3 <= call <= 6, dtype=torch.bool))
    flags = [*script_flags, "--output_dir", tmp_path, "--max_bad_steps", "3", "--logging_steps", "8"]
    assert train_script(flags) == 0
    assert logged_scalars(tmp_path, "train/bad_updates_in_a_row") == {8: 4}


def test_a_loss_that_is_not_finite_is_skipped_even_if_its_gradient_is(
    train_script, script_flags, trained, tmp_path, monkeypatch
):
    module, name = trained.losses.rsplit(".", 1)
    calls, original = [0], getattr(importlib.import_module(module), name)

    def infinite(*arguments):
        calls[0] += 1
        return trained.plus(original(*arguments), float("inf") if calls[0] == 3 else 0.0)

    replace_everywhere(trained.losses, infinite, monkeypatch)
    assert train_script([*script_flags, "--output_dir", tmp_path, "--checkpointing_steps", "1"]) == 0
    assert_unchanged(tmp_path / "checkpoint-2", tmp_path / "checkpoint-3")
    assert logged_scalars(tmp_path, "train/skipped_updates")[8] == 1


def test_a_report_that_fails_does_not_end_the_run(train_script, script_flags, trained, tmp_path, monkeypatch, capsys):
    import utils.training.nan_report

    def fails(*arguments):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(utils.training.nan_report, "find_first_bad_module", fails)
    spoil(monkeypatch, trained, lambda call, level: torch.full_like(level, call == 3, dtype=torch.bool))
    assert train_script([*script_flags, "--output_dir", tmp_path]) == 0
    said = capsys.readouterr()
    assert "its report is not complete (OutOfMemoryError: no room)" in said.out + said.err
    assert json.loads((tmp_path / "nan_report/update-3/report.json").read_text())["bad_gradients"]["count"] > 0


def test_too_many_in_a_row_end_the_run_with_good_weights(train_script, script_flags, trained, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, trained, lambda call, level: torch.full_like(level, call > 4, dtype=torch.bool))
    flags = [*script_flags, "--output_dir", tmp_path, "--checkpointing_steps", "4", "--max_bad_steps", "3"]
    assert train_script([*flags, "--max_train_steps", "50"]) == 3
    assert_unchanged(tmp_path / "checkpoint-4", tmp_path / "checkpoint-7")
    output = capsys.readouterr()
    assert "3 updates in a row" in output.out + output.err and "--learning_rate" in output.out + output.err
    assert (tmp_path / "exit_status").read_text() == "3\n"
