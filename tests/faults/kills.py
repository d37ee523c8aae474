"""Kills a training run at random moments, again and again, and compares what is left with a run that nobody disturbed.

Shared by the tests and by benchmarks/reliability/chaos.py.
"""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from conftest import logged_scalars, same_bytes
from fork_server import ForkServer, Run

from utils.runs.checkpoints import list_checkpoints, verify_checkpoint

BYTES = ("model.safetensors", "ema.safetensors", "optimizer.bin")
EXPORTED = "unet/diffusion_pytorch_model.safetensors"
TAGS = ("train/loss", "train/lr", "train/grad_norm", "train/ema_distance")


@dataclass
class Tally:
    kills: int = 0
    in_save: int = 0  # of those, while a checkpoint was being written, published or removed
    before_first: int = 0  # of those, before the run had any checkpoint
    invalid: list[str] = field(default_factory=list)  # published checkpoints that fail verification or hold other bytes
    finished: int = 0  # runs that came to their end
    different: list[str] = field(default_factory=list)  # what in them is not that of the undisturbed run
    updates_lost: list[int] = field(default_factory=list)  # for each kill


def kill_at_random(
    server: ForkServer, script: str, flags: list, folder: Path, *, kills: int, seed: int, share_in_save: float = 0.5
) -> Tally:
    """Runs `script` to its end as often as it takes to kill it `kills` times; each life resumes with `latest`.

    `share_in_save` of the kills wait for a save to begin and strike up to 20 ms later, about as long as a quick one lasts;
    the others strike at any moment in the time that a whole run takes.
    """
    generator, tally = random.Random(seed), Tally()
    whole = folder / "whole"
    for output_dir in (whole, folder / "again"):
        start = time.monotonic()
        [run] = server.start([script, *flags, "--output_dir", output_dir])
        assert run.wait() == 0, run.text()
    whole_seconds = time.monotonic() - start  # of the second one, which had its data packed already
    assert not differences(folder / "again", whole)
    while tally.kills < kills:
        disturbed, trace = folder / f"disturbed-{tally.finished}", folder / "trace"
        command = ["tests/faults/inject.py", script, "none", "--record", trace, "--", *flags, "--output_dir", disturbed]
        command += ["--resume_from_checkpoint", "latest", "--checkpoints_total_limit", 2]
        while True:
            trace.unlink(missing_ok=True)
            before, marks = newest(disturbed), saves_under_way(disturbed)
            [run] = server.start(command)
            if tally.kills < kills:
                if generator.random() < share_in_save:
                    wait_for_save(run, disturbed, marks, delay=generator.uniform(0, 0.02))
                else:
                    wait(run, generator.uniform(0, whole_seconds))
                run.kill()
            if run.wait() != -9:
                break
            tally.kills += 1
            tally.in_save += saves_under_way(disturbed) != marks
            tally.before_first += newest(disturbed) == 0
            done = before + (trace.read_text().count("\n") if trace.exists() else 0)
            tally.updates_lost.append(max(0, done - newest(disturbed)))
            tally.invalid += invalid_checkpoints(disturbed, whole)
        assert run.status == 0, run.text()
        tally.finished += 1
        tally.different += [f"{disturbed.name}: {what}" for what in differences(disturbed, whole)]
    return tally


def newest(folder: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in list_checkpoints(folder)), default=0)


def saves_under_way(folder: Path) -> set:
    """The half-made and half-removed checkpoints, such that those of an earlier life can be told from new ones."""
    marks = set()
    for path in folder.glob(".tmp-*checkpoint-*"):
        try:
            marks.add((path.name, path.stat().st_ctime_ns))
        except FileNotFoundError:  # published at this moment
            marks.add((path.name, None))
    return marks


def wait(run: Run, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.001)


def wait_for_save(run: Run, folder: Path, marks: set, delay: float) -> None:
    while saves_under_way(folder) <= marks and run.poll() is None:
        time.sleep(0.0005)
    wait(run, delay)


def invalid_checkpoints(folder: Path, whole: Path) -> list[str]:
    """Problems of the published checkpoints: what verification says, and bytes other than those of the undisturbed run."""
    problems = []
    for path in list_checkpoints(folder):
        if problem := verify_checkpoint(path):
            problems.append(f"{path.name}: {problem}")
        problems += [f"{path.name}: {name} differs" for name in BYTES if not same(path / name, whole / path.name / name)]
    return problems


def differences(folder: Path, whole: Path) -> list[str]:
    """What a finished run has that differs from the undisturbed one: bytes of the last checkpoint and the export, curves."""
    last = list_checkpoints(whole)[-1].name
    names = [f"{last}/{name}" for name in BYTES] + [EXPORTED]
    different = [name for name in names if not same(folder / name, whole / name)]
    return different + [tag for tag in TAGS if logged_scalars(folder, tag) != logged_scalars(whole, tag)]


def same(first: Path, second: Path) -> bool:
    return first.is_file() and same_bytes(first, second)
