"""Finding what fits, and saying what to set, with memory that is told to be small."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import utils.training.memory_plan
from utils.core.errors import UserError, out_of_memory
from utils.optim.optimizers import make_optimizer
from utils.options.flags import DDPMOptions
from utils.training.memory_estimate import SHARE, TrialStep, UpdateParts, estimate_memory
from utils.training.memory_plan import MemoryPlan

MIB = 2**20
SHAPE = (1, 16, 16)


class Network(nn.Module):
    """Six blocks of two convolutions, each checkpointed when asked, with the output of a UNet2DModel."""

    def __init__(self, image_channels: int, resolution: int, gradient_checkpointing: bool):
        super().__init__()
        self.first, self.last = nn.Conv2d(image_channels, 8, 3, padding=1), nn.Conv2d(8, image_channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(2) for layer in (nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)))) for _ in range(6)
        )
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, images, timesteps):
        hidden = self.first(images)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.gradient_checkpointing else block(hidden)
        return SimpleNamespace(sample=self.last(hidden))


OPTIONS = DDPMOptions(image_channels=1, resolution=16, train_batch_size="auto")
OPTIMIZER = partial(make_optimizer, options=OPTIONS)


def make_network(options: DDPMOptions) -> Network:
    return Network(options.image_channels, options.resolution, options.gradient_checkpointing)


@pytest.fixture
def plan_with(monkeypatch):
    """A plan for a device with so many MiB free, of what the options say."""

    def make(mib: float, **options) -> MemoryPlan:
        monkeypatch.setattr(
            utils.training.memory_plan, "free_memory", lambda device, local_processes: mib * MIB // local_processes
        )
        return MemoryPlan(Accelerator(cpu=True), replace(OPTIONS, **options), make_network, OPTIMIZER)

    return make


def peak(batch: int, accumulates: bool, **options) -> float:
    network = partial(make_network, replace(OPTIONS, **options))
    return estimate_memory(UpdateParts(network, OPTIMIZER, SHAPE), batch, "cpu", accumulates=accumulates).peak / MIB


@pytest.mark.slow
def test_auto_takes_the_largest_divisor_that_fits_and_keeps_the_global_batch(plan_with):
    peaks = {batch: peak(batch, accumulates=batch < 24) for batch in (24, 12, 8, 6)}
    free = (peaks[8] + peaks[12]) / 2 / SHARE
    assert plan_with(free, global_batch_size=24).split() == (8, 3)
    assert plan_with(1.01 * peaks[24] / SHARE, global_batch_size=24).split() == (24, 1)
    with pytest.raises(UserError, match="no --train_batch_size fits"):
        plan_with(0.01, global_batch_size=24).split()


@pytest.fixture
def tried(monkeypatch) -> list[int]:
    """The micro batches of real updates, which run out of memory with more than four images."""
    sizes, run = [], TrialStep.run

    def limited(step, micro_batch_size, micro_steps):
        if not isinstance(step.parameters[0], FakeTensor):
            sizes.append(micro_batch_size)
            if micro_batch_size > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return run(step, micro_batch_size, micro_steps)

    monkeypatch.setattr(TrialStep, "run", limited)
    return sizes


def test_a_trial_that_runs_out_of_memory_gives_way_to_the_next_smaller(plan_with, tried):
    state = torch.random.get_rng_state()
    plan = plan_with(1000, global_batch_size=12)
    assert plan.split() == (4, 3)
    assert tried == [12, 6, 4]
    assert torch.equal(state, torch.random.get_rng_state())
    assert "tests it" not in plan.table(4, 3)


def test_without_trials_the_prediction_decides_and_the_table_says_so(plan_with, tried):
    plan = plan_with(1000, global_batch_size=12, dry_run=True)
    assert plan.split() == (12, 1)
    assert tried == []
    assert "predicted to fit; a run tests it" in plan.table(12, 1)


def test_processes_on_a_cpu_share_what_is_free(plan_with, monkeypatch):
    free = 1.01 * peak(8, accumulates=False) / SHARE
    alone = plan_with(free)
    assert alone.fits(alone.estimate(8, 1)) and "processes" not in alone.table(8, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shared = plan_with(free)
    assert shared.free == alone.free // 2 and not shared.fits(shared.estimate(8, 1))
    assert "that are free to each of 2 processes" in shared.table(8, 1)


@pytest.mark.slow
def test_advice_fits(plan_with):
    """What is advised is what the estimates allow: smaller micro batches, and checkpointing where one image is too much."""
    free = 1.01 * peak(8, accumulates=True) / SHARE
    table = plan_with(free).table(32, 1)
    assert "does not fit" in table and "set --train_batch_size 8 --gradient_accumulation_steps 4" in table
    assert "\nfits: " in plan_with(1.01 * peak(32, False) / SHARE).table(32, 1)
    checkpointed = peak(1, accumulates=True, gradient_checkpointing=True)
    assert checkpointed < 0.98 * peak(1, accumulates=True)
    advice = plan_with(1.01 * checkpointed / SHARE).advice(8, 1)
    assert advice == "set --train_batch_size 1 --gradient_accumulation_steps 8 --gradient_checkpointing"
    assert plan_with(0.01).advice(8, 1).startswith("not even one image fits")
    explained = plan_with(free).explain(32, 1)
    assert "asked: 32 images of 1x16x16" in explained and f"predicted: {peak(32, False) / 1024:.2f} GiB" in explained


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error, expected):
    assert out_of_memory(error) == expected


# ---- in the script


@pytest.mark.slow
def test_a_dry_run_says_what_is_needed_and_touches_nothing(train_script, script_flags, capsys, monkeypatch, tmp_path):
    (tmp_path / "options.json").write_text("{}")
    flags = [*script_flags, "--dry_run", "--overwrite_output_dir", "--channels_last", "--gradient_checkpointing"]
    flags += ["--eval_images", 50]
    for status, fits in ((0, "\nfits: "), (3, "does not fit: ")):
        assert train_script([*flags, "--output_dir", tmp_path]) == status
        said = capsys.readouterr().out
        for word in ("parameters", "gradients", "optimizer", "EMA", "activations", "predicted peak", "FLOPs per image", fits):
            assert word in said
        assert "\nwarning: --eval_images has no effect without --eval_steps\n" in said
        assert [path.name for path in tmp_path.iterdir()] == ["options.json"]
        monkeypatch.setattr(utils.training.memory_plan, "free_memory", lambda *_: MIB)


@pytest.mark.slow
def test_an_automatic_batch_size_resumes_as_the_same_run(train, tiny_flags, tmp_path, monkeypatch):
    """Found with little memory, kept with much; the weights are those of a run that was given the same split."""
    most = [2]
    monkeypatch.setattr(MemoryPlan, "fits", lambda plan, found: found.micro_batch_size <= most[0])
    common = [*tiny_flags, "--lr_scheduler", "constant_with_warmup", "--checkpointing_steps", 4]
    flags = [*common, "--train_batch_size", "auto", "--global_batch_size", 8, "--output_dir", tmp_path / "auto"]
    assert train([*flags, "--max_train_steps", 4]) == 0
    most[0] = 8
    assert train([*flags, "--resume_from_checkpoint", "latest"]) == 0
    resolved = json.loads((tmp_path / "auto/options.json").read_text())["resolved"]
    assert (resolved["micro_batch_size"], resolved["gradient_accumulation_steps"]) == (2, 4)
    plain = ["--train_batch_size", 2, "--gradient_accumulation_steps", 4, "--output_dir", tmp_path / "plain"]
    assert train([*common, *plain]) == 0
    auto, plain = (load_file(tmp_path / name / "checkpoint-8/model.safetensors") for name in ("auto", "plain"))
    assert all(torch.equal(auto[name], plain[name]) for name in plain)


@pytest.mark.parametrize(("width", "said"), [(8, ""), (1600, "--model_preset small64 is made for CPUs")])
def test_a_network_made_for_gpus_is_warned_of_on_a_cpu(width, said, capsys):
    def make_network(options):
        return nn.Conv2d(width, width, 3)  # 23 M parameters

    MemoryPlan(Accelerator(cpu=True), DDPMOptions(resolution=64, train_batch_size=2), make_network, None).settle()
    warned = capsys.readouterr().out
    assert said in warned and ("23.0 M parameters on a CPU" in warned) is bool(said)


def test_the_small_network_that_is_named_suits_the_latents(capsys):
    of_latents = SimpleNamespace(latent_shape=(4, 32, 32))
    options = DDPMOptions(resolution=256, train_batch_size=2)
    MemoryPlan(Accelerator(cpu=True), options, lambda _: nn.Conv2d(1600, 1600, 3), None, of_latents).settle()
    assert "--model_preset small32 is made for CPUs" in capsys.readouterr().out
