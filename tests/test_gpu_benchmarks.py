"""The commands that wait for a GPU: that each can be started, without running it."""

import importlib
import shlex
from pathlib import Path

import pytest
import torch

import train_ddpm
from benchmarks import bare_loop, gpu_all, memory_prediction
from utils.unet import make_unet


@pytest.mark.parametrize("name", gpu_all.PARTS)
def test_commands_are_understood(name, tmp_path, monkeypatch, capsys):
    script, *flags = shlex.split(gpu_all.PARTS[name][1].format(folder=tmp_path))
    assert (Path(gpu_all.ROOT) / script).exists()
    if script == "benchmarks/throughput.py":
        flags = [*flags[flags.index("--dataset_name") :], "--output_dir", str(tmp_path)]  # those before are its own
    if script in ("train_ddpm.py", "benchmarks/throughput.py"):
        train_ddpm.parse_args(flags)
    else:  # --help after the flags: argparse has read them by then, and refuses those that it does not know
        monkeypatch.setattr("sys.argv", [script, *flags, "--help"])
        with pytest.raises(SystemExit) as end:
            importlib.import_module(f"benchmarks.{Path(script).stem}").main()
        assert end.value.code == 0


def test_all_parts_fit_into_their_time():
    """The first ones, which tell most, have all the time that they may take."""
    seconds = [limit for limit, _ in gpu_all.PARTS.values()]
    assert sum(seconds[:6]) <= 25 * 60


def test_a_part_that_hangs_is_ended(tmp_path):
    assert gpu_all.run("-c 'import time; time.sleep(60)'", tmp_path / "log", limit=0.5) is None
    assert gpu_all.run("-c 'print(1); raise SystemExit(3)'", tmp_path / "log", limit=30) == 3
    assert (tmp_path / "log").read_text() == "1\n"


def test_at_least_eight_configurations_are_compared():
    for configurations in (memory_prediction.ON_A_CPU, memory_prediction.ON_A_GPU):
        assert len(set(map(str, configurations))) == len(configurations) >= 8


@pytest.mark.parametrize("ema", ["none", "foreach", "diffusers"])
def test_bare_loops_train(ema):
    """Each makes the updates of a plain loop."""
    loop = bare_loop.BareLoop("digits16", bare_loop.Switches(sdpa=True, ema=ema, item=True), 2, torch.device("cpu"))
    network = make_unet(resolution=16, image_channels=1, preset="digits16").train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    for _ in range(3):
        prediction = network(loop.noisy_images, loop.timesteps).sample
        torch.nn.functional.mse_loss(prediction, loop.noise).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for own, expected in zip(loop.unet.parameters(), network.parameters()):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5)


def test_flops_of_a_preset_are_those_that_others_counted():
    """6.1 G multiply-adds forward (Fang et al. 2023, Structural Pruning for Diffusion Models, table 1), twice that backward."""
    assert bare_loop.preset_flops("cifar10") == pytest.approx(3 * 2 * 6.1e9, rel=0.05)
