"""The benchmarks, many of which wait for a GPU: that each command can be started, and that they measure what they say."""

import functools
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import slow_turns

from benchmarks import gpu_all
from benchmarks.memory import gradient_checkpointing, prediction
from benchmarks.reliability import precisions
from benchmarks.shared import bare_loop, measuring, real_script
from benchmarks.shared.tasks import SIZES, TASKS, make_task
from benchmarks.speed import sampling, throughput
from models.edm2_unet import PRESETS, MPConv2d, MPLinear
from utils.core.errors import UserError
from utils.core.signals import STOP_SIGNALS
from utils.diffusion.edm2 import EDM2Denoiser
from utils.diffusion.unet import make_edm2_unet, make_unet
from utils.options.flags import DDPMOptions, EDM2Options
from utils.options.presets import EDM2_FLAGS, FLAGS, NETWORKS


@pytest.mark.parametrize("name", gpu_all.PARTS)
def test_commands_are_understood(name, tmp_path):
    script, *flags = shlex.split(gpu_all.PARTS[name][1].format(folder=tmp_path))
    assert (Path(gpu_all.ROOT) / script).exists()
    if script == "benchmarks/speed/throughput.py":
        options, flags = throughput.parse_args(flags)
        script, flags = options.script, [*flags, "--output_dir", str(tmp_path)]
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    module.parse_args(flags)
    with pytest.raises((SystemExit, UserError)):
        module.parse_args([*flags, "--no_such_flag"])


def test_a_part_that_hangs_is_ended(tmp_path):
    assert gpu_all.run("-c 'import time; time.sleep(60)'", tmp_path / "log", limit=0.5) is None
    assert gpu_all.run("-c 'print(1); raise SystemExit(3)'", tmp_path / "log", limit=30) == 3
    assert (tmp_path / "log").read_text() == "1\n"


def test_the_table_comes_last_and_names_what_failed(tmp_path, monkeypatch, capsys):
    parts = {
        "good": (60, '-c \'print("noise"); print("=> 12 images/s")\''),
        "bad": (60, "-c 'raise SystemExit(\"no such GPU\")'"),
        "late": (10**6, "-c 'print(1)'"),
    }
    monkeypatch.setattr(gpu_all, "PARTS", parts)
    gpu_all.main(["--output_dir", str(tmp_path), "--minutes", "5"])
    said = capsys.readouterr().out
    table = said[said.index("part  ") :].splitlines()
    assert [line.split()[0] for line in table] == ["part", "good", "bad", "late"]
    assert table[1].endswith("12 images/s") and table[2].endswith("exit status 1: no such GPU") and "no time" in table[3]
    assert (tmp_path / "table.txt").read_text().startswith("part  ")


SMALLER = {
    **{"train_batch_size": 8, "batch_size": 2, "global_batch_size": 8, "eval_batch_size": 1, "resolution": 16},
    **{"blocks": 2, "block_updates": 1, "turns": 1, "max_train_steps": 2},
}


def smaller(command: str) -> str:
    """The same flags with small numbers, and without what a CPU does not have."""
    for flag, value in SMALLER.items():
        command = re.sub(rf"--{flag} \d+", f"--{flag} {value}", command)
    return command.replace("fp16", "bf16")


@pytest.fixture
def small_world(monkeypatch, in_this_process):
    """Every preset is a tiny network for small images, and compiling, which takes minutes, changes nothing."""
    for name in NETWORKS.keys() & SIZES:
        network = NETWORKS[name]
        levels = len(network["block_out_channels"])
        tiny = {"block_out_channels": (8,) * levels, "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 8}
        monkeypatch.setitem(NETWORKS, name, network | tiny)
        side = 2 ** max(levels - 1, 4)
        small = {"resolution": side, "ddpm_num_inference_steps": 2, "eval_batch_size": 1}
        monkeypatch.setitem(FLAGS, name, FLAGS[name] | small)
        monkeypatch.setitem(SIZES, name, (side, SIZES[name][1]))
    tiny = {"model_channels": 8, "channel_multipliers": (1, 2), "layers_per_block": 1, "attention_head_dim": 8}
    for name in PRESETS:
        monkeypatch.setitem(PRESETS, name, tiny | {"attention_resolutions": (8,)})
        monkeypatch.setitem(EDM2_FLAGS, name, EDM2_FLAGS[name] | {"num_inference_steps": 2})
    few = functools.partial(real_script.synthetic_dataset, count=160)
    monkeypatch.setattr(throughput, "synthetic_dataset", few)
    monkeypatch.setattr(sampling, "SAMPLERS", (("ddim", 2), ("dpmsolver++", 2)))
    rows = [smaller(row) for row in prediction.ON_A_GPU]
    monkeypatch.setattr(prediction, "ON_A_CPU", tuple(dict.fromkeys(rows))[:4])
    rows = [(script, preset, 16, 2, switches) for script, preset, *_, switches in gradient_checkpointing.ON_A_GPU]
    monkeypatch.setattr(gradient_checkpointing, "ON_A_CPU", tuple(dict.fromkeys(rows))[:4])
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: setattr(module, "_compiled_call_impl", module._call_impl))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"):
        monkeypatch.setenv(name, "")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


# They repeat the part "cifar10 256" or "EDM2 XS 64x64 64" with another preset or batch, which in small is the same.
REPEATED = {"celeba64 64", "cifar10 512", "256 16", "cifar10 128 eager", "digits16 512", "EDM2 S 64x64 32 eager"}
APART = {"precisions", "doctor, healthy"}  # of many processes: see below, and test_ask.py
LONGEST = ["switches cifar10", "checkpointing"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in gpu_all.PARTS if name not in {*REPEATED, *APART, *LONGEST}] + slow_turns(*LONGEST)
)
def test_each_part_runs_in_small(name, tmp_path, small_world, monkeypatch, capsys):
    """The commands of gpu_all.py, with the networks, images and numbers of a rehearsal, to the row of its table."""
    script, *flags = shlex.split(smaller(gpu_all.PARTS[name][1].format(folder=tmp_path)))
    flags += ["--batch_size", "2"] if "precision" in script else []
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    monkeypatch.setattr(sys, "argv", [script, *flags])
    takes_options = "throughput" in script or script.startswith("train_")
    assert not (module.main(module.parse_args(flags)) if takes_options else module.main())
    (tmp_path / "log").write_text(capsys.readouterr().out)
    found = gpu_all.found_in(tmp_path / "log", 0)
    assert found != ["nothing to say"] and not any("left out" in line for line in found)


@pytest.mark.slow
def test_precisions_compare_what_is_resumed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(precisions, "SCRIPTS", ("train_ddpm.py",))
    monkeypatch.setattr(precisions, "ANYWHERE", {"fp32": ""})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert precisions.main(precisions.parse_args(["--updates", "8", "--keep", str(tmp_path)])) == 0
    deterministic, plain = capsys.readouterr().out.splitlines()
    assert deterministic.startswith(
        "=> ok    train_ddpm.py fp32, deterministic: resumed: the same bits of 7 files; 5 looks, no finding"
    )
    assert plain.startswith("=> ok    train_ddpm.py fp32: 5 looks, no finding")
    checkpoint = tmp_path / "ddpm-fp32-deterministic-c" / "checkpoint-8" / "model.safetensors"
    before = precisions.weights(checkpoint.parents[1])
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1] + b"x")
    assert precisions.weights(checkpoint.parents[1]) != before


@pytest.mark.parametrize("ema", ["none", "script", "diffusers"])
def test_bare_loops_train(ema):
    """Each makes the updates of a plain loop."""
    switches = bare_loop.Switches(sdpa=True, ema=ema, item=True)
    loop = bare_loop.BareLoop(make_task("train_ddpm.py", "digits16"), switches, 2, torch.device("cpu"))
    network = make_unet(DDPMOptions(resolution=16, image_channels=1, model_preset="digits16")).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    for _ in range(3):
        prediction = network(loop.batch["noisy_images"], loop.batch["timesteps"]).sample
        torch.nn.functional.mse_loss(prediction, loop.batch["noise"]).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    start = make_unet(DDPMOptions(resolution=16, image_channels=1, model_preset="digits16"))
    for own, expected in zip(loop.unet.parameters(), network.parameters()):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5)
    if ema != "none":  # on its way from the first weights to the last
        averages = loop.ema.shadow_params if ema == "diffusers" else loop.ema.shadow.values()
        moved = [(average - first).norm() for average, first in zip(averages, start.parameters())]
        whole = [(last - first).norm() for last, first in zip(loop.unet.parameters(), start.parameters())]
        assert 0 < sum(moved) < sum(whole)


@pytest.mark.parametrize("forced", [False, True])
def test_bare_loops_train_edm2(forced):
    """The updates of a plain loop, with the loss as in Karras et al. 2024, eq. 14, and, if forced, with every weight vector
    brought back to unit variance (eq. 66)."""
    switches = bare_loop.Switches(sdpa=True, force_weight_norm=forced)
    loop = bare_loop.BareLoop(make_task("train_edm2.py", "digits16"), switches, 4, torch.device("cpu"))
    unet = make_edm2_unet(EDM2Options(resolution=16, image_channels=1, model_preset="digits16"), num_classes=10)
    denoiser = EDM2Denoiser(unet, 0.5).train()
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=1e-3, betas=(0.9, 0.99))
    clean_images, noisy_images, sigmas, labels = loop.batch.values()
    weight = 1 / sigmas**2 + 1 / 0.5**2
    for _ in range(3):
        denoised, u = denoiser(noisy_images, sigmas, labels)
        errors = (denoised - clean_images).square().mean((1, 2, 3))
        (weight * errors * torch.exp(-u) + u).mean().backward()
        torch.nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for layer in denoiser.modules() if forced else ():
            if isinstance(layer, (MPConv2d, MPLinear)):
                rows = layer.weight.detach().flatten(1)
                layer.weight.data /= rows.square().mean(1).sqrt().view(-1, *[1] * (layer.weight.ndim - 1))
    for own, expected in zip(loop.trained.parameters(), denoiser.parameters()):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)


def test_peak_memory_is_the_most_at_once():
    with measuring.PeakMemory(torch.device("cpu")) as peak:
        for _ in range(3):
            first = torch.empty(1000)
            second = torch.empty(500)
            del first, second
    assert peak.bytes == pytest.approx(6000, abs=256)  # bytes, up to the allocator's alignment


def test_a_report_is_charged_by_its_share():
    """Blocks of 10 updates of 2 s, every second one with a report of 5 s; a real run reports every 50 updates."""
    race = throughput.SideBySide(torch.device("cpu"), 10, lambda: 0.0, dict)
    race.blocks = [2.0, 2.5] * 3
    assert race.report_seconds() == pytest.approx(5.0)
    assert race.update_seconds(50) == pytest.approx([2.1] * 6)


def test_what_is_timed_apart_is_not_the_updates():
    """Blocks of two updates of 3 s, in the last of which 100 s of validation fall."""
    now = [0.0]

    def takes(seconds):
        now[0] += seconds

    race = throughput.SideBySide(torch.device("cpu"), 2, lambda: now[0], dict)
    validate = race._timed_apart("validation", takes)
    for update in range(8):
        takes(3.0)
        if update == 7:
            validate(100.0)
        race.after_update()
    assert race.blocks == [3.0, 3.0] and race.apart == {"validation": [100.0]}


@pytest.fixture
def in_this_process(monkeypatch):
    """Puts back what a script that is run in this process leaves behind."""
    from accelerate.state import AcceleratorState

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize("script", TASKS)
def test_predictions_hold_for_the_real_script(script, tmp_path, capsys, in_this_process):
    """Within 5 % of what its forward pass keeps; and the whole peak is more than the activations."""
    configuration = f"{script} --model_preset digits16 --train_batch_size 16 --gradient_checkpointing --cpu_threads 1"
    activations, peak = prediction.compare(configuration, tmp_path, torch.device("cpu"))
    assert abs(activations) < 0.05
    assert abs(peak) < 0.15
    row = capsys.readouterr().out.split()
    real_activations, real_peak = float(row[1]), float(row[5])
    assert 0 < real_activations < real_peak


TINY = "--blocks 2 --block_updates 1 --eval_batch_size 1 --validation_images 8 --cpu_threads 1"


@pytest.mark.parametrize("flags", ["--optimizer sgd", "--no-use_ema", "--max_grad_norm 0", "--spectral_norm"])
def test_what_the_other_loops_do_not_do_is_refused(flags):
    with pytest.raises(SystemExit, match="the other loops do not know --"):
        throughput.main(throughput.parse_args([*TINY.split(), *flags.split()]))


@pytest.mark.slow
def test_throughput_of_two_processes():
    flags = f"{TINY} --ddpm_num_inference_steps 2".split()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TQDM_MININTERVAL": "60"}
    command = [*launcher, "benchmarks/speed/throughput.py", *flags]
    done = subprocess.run(command, cwd=gpu_all.ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("; 2 processes; ") == done.stdout.count("\n=> train_ddpm.py") == 1
    assert "\nbare" not in done.stdout


@pytest.mark.slow
def test_flops_of_a_preset_are_those_that_others_counted():
    """6.1 G multiply-adds forward (Fang et al. 2023, Structural Pruning for Diffusion Models, table 1), twice that backward."""
    assert make_task("train_ddpm.py", "cifar10").flops() == pytest.approx(3 * 2 * 6.1e9, rel=0.05)


@pytest.mark.slow
def test_the_grid_of_samplers_is_drawn(tmp_path):
    from benchmarks.quality import sampler_grid

    process = ["--schedules", "sigmoid", "--prediction_types", "sample", "--updates", "1", "--images", "4"]
    threads = torch.get_num_threads()
    sampler_grid.main([*process, "--output_dir", str(tmp_path), "--cache_dir", str(tmp_path)])
    torch.set_num_threads(threads)
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len(lines) == 4 and lines[-1].startswith("| sample, sigmoid |") and lines[-1].count(" %, ") == 4
    assert (tmp_path / "grid.png").stat().st_size > 1000
