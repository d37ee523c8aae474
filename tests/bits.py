"""What a change of the code's shape may not change: the bits that the training scripts compute, and what they make of flags.

    python tests/bits.py        # records tests/recorded anew: only for a change that is meant to change bits

tests/scripts/test_bits.py compares. Other processors and versions round otherwise: `canary` is a hash of arithmetic that calls
nothing of this project, and only where it is the recorded one are bits asked for; elsewhere values close to them.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

FOLDER = Path(__file__).parent / "recorded"
STEPS, KEPT, RESUMED = 8, 4, 6  # updates of a run; of the checkpoint that is kept here; of the run that continues it
SMALL = {  # where it differs from the tiny network of conftest.py
    "train_ddpm.py": {"block_out_channels": [4, 8], "norm_num_groups": 2},
    "train_edm2.py": {"model_channels": 4, "attention_head_dim": 4},
}
RUNS = {  # name -> (flags beside the common ones, processes)
    "fp32": (["--dropout", "0.1"], 1),
    "bf16": (["--mixed_precision", "bf16", "--random_flip"], 1),
    "accumulation": (["--gradient_accumulation_steps", "2", "--validation_images", "20", "--validation_steps", "4"], 1),
    "two processes": ([], 2),
    "preset": ([], 1),
}


def flags_of(name: str, script: str, folder: Path, steps: int = STEPS) -> list[str]:
    """Of a run of RUNS on the digits; the network's config and the packed images lie in `folder`."""
    from conftest import TINY_EDM2_NETWORK, TINY_NETWORK

    flags = ["--dataset_name", "digits", "--cache_dir", folder / "cache", "--train_batch_size", 8, "--cpu_threads", 1]
    flags += ["--max_train_steps", steps, "--checkpointing_steps", KEPT, "--eval_batch_size", 2, "--logging_steps", 2]
    flags += ["--ddpm_num_inference_steps" if script == "train_ddpm.py" else "--num_inference_steps", 2]
    if name != "preset":
        config = folder / Path(script).stem / "config.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps((TINY_NETWORK if script == "train_ddpm.py" else TINY_EDM2_NETWORK) | SMALL[script]))
        flags += ["--model_config_name_or_path", config.parent]
        flags += ["--resolution", 16, "--image_channels", 1, "--lr_warmup_steps", 4]
    return [str(flag) for flag in [*flags, *RUNS[name][0]]]


def tensors(found: object, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of nested dictionaries and lists, and numbers as tensors, by their path."""
    if isinstance(found, torch.Tensor):
        return {name: found}
    if isinstance(found, dict):
        found = found.items()
    elif isinstance(found, (list, tuple)):
        found = enumerate(found)
    else:
        return {name: torch.tensor(found, dtype=torch.float64)} if isinstance(found, (int, float)) else {}
    return {path: value for key, part in found for path, value in tensors(part, f"{name}/{key}").items()}


def fingerprint(checkpoint: Path) -> dict[str, dict]:
    """File of a checkpoint -> {"sha256" of its tensors' names, types, shapes and bytes, "size": their L2 norm}."""
    from safetensors.torch import load_file

    prints = {}
    for file in [*sorted(checkpoint.glob("*.safetensors")), checkpoint / "optimizer.bin"]:
        content = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        digest, squares = hashlib.sha256(), 0.0
        for name, value in sorted(tensors(content).items()):
            value = value.detach().contiguous()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
            squares += value.double().square().sum().item() * (value.numel() > 1)  # moments, not counts of steps
        prints[file.name] = {"sha256": digest.hexdigest(), "size": squares**0.5}
    return prints


def canary() -> str:
    """Hash of a few updates of a network of torch alone, in fp32 and bf16: what these kernels make of the same numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    digest = hashlib.sha256(torch.__version__.encode())
    for bf16 in (False, True):
        generator = torch.Generator().manual_seed(0)
        layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.Flatten(2)
        )
        attention, last = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)
        parameters = [*layers.parameters(), *attention.parameters(), *last.parameters()]
        for parameter in parameters:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        for _ in range(3):
            images = torch.randn(8, 1, 16, 16, generator=generator)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                tokens = layers(images).transpose(1, 2)
                loss = last(attention(tokens, tokens, tokens, need_weights=False)[0]).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for parameter in parameters:
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    torch.set_num_threads(threads)
    return digest.hexdigest()


def record() -> None:
    import tempfile

    from fork_server import ForkServer

    FOLDER.mkdir(exist_ok=True)
    found = {"canary": canary(), "runs": {}, "resumed": {}}
    with ForkServer() as server, tempfile.TemporaryDirectory() as temporary:
        for script in SMALL:
            for name, (_, processes) in RUNS.items():
                folder = Path(temporary) / f"{Path(script).stem}-{name}"
                runs = server.start([script, *flags_of(name, script, Path(temporary)), "--output_dir", folder], processes)
                assert [run.wait(300) for run in runs] == [0] * processes, runs[0].text()
                found["runs"].setdefault(script, {})[name] = fingerprint(folder / f"checkpoint-{STEPS}")
            kept = FOLDER / Path(script).stem
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(Path(temporary) / f"{Path(script).stem}-fp32" / f"checkpoint-{KEPT}", kept / f"checkpoint-{KEPT}")
            found["resumed"][script] = resumed(server, script, Path(temporary))
    (FOLDER / "bits.json").write_text(json.dumps(found, indent=1) + "\n")


def resumed(server, script: str, folder: Path) -> dict[str, dict]:
    """The fingerprint of a run that continued the checkpoint that is kept here."""
    output_dir = folder / f"{Path(script).stem}-resumed"
    shutil.copytree(FOLDER / Path(script).stem, output_dir)
    flags = [*flags_of("fp32", script, folder, RESUMED), "--checkpointing_steps", RESUMED]
    [run] = server.start([script, *flags, "--output_dir", output_dir, "--resume_from_checkpoint", "latest"])
    assert run.wait(300) == 0, run.text()
    return fingerprint(output_dir / f"checkpoint-{RESUMED}")


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "faults")]
    record()
