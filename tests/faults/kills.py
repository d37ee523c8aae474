"""Kills a training run in each of its phases, again and again, and compares what is left with a run that nobody disturbed.

Shared by the tests and by benchmarks/reliability/chaos.py.
"""

import json
import math
import random
import shutil
import signal
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

from conftest import logged_scalars, same_bytes
from fork_server import ForkServer, Run

from utils.runs.checkpoint_files import list_checkpoints, verify_checkpoint

BYTES = ("model.safetensors", "ema.safetensors", "optimizer.bin")
EXPORTED = "unet/diffusion_pytorch_model.safetensors"
TAGS = ("train/loss", "train/lr", "train/grad_norm", "train/ema_distance")


PHASED = ["--max_train_steps", 24, "--checkpointing_steps", 3, "--save_images_steps", 8]
PHASED += ["--eval_steps", 12, "--eval_images", 32]
FRESH, RESUMED = "fresh", "resumed"
TWICE = "a start that resumes, twice in a row"


class Phase(NamedTuple):
    """When to kill."""

    open: tuple[str, ...] = ()  # what the run must be in, by the names that inject.py notes, the innermost last; any moment
    starts: tuple[str, ...] = (FRESH, RESUMED)  # such runs have it


PHASES = {
    "any moment": Phase(),
    "a save": Phase(("save",)),
    "the first save of a run": Phase(("save",), (FRESH,)),
    "a start that resumes": Phase(("begin",), (RESUMED,)),
    TWICE: Phase(("begin",), (RESUMED,)),
    "a preview, with averaged weights": Phase(("preview", "averaged")),
    "an evaluation": Phase(("evaluation",)),
    "packing of images": Phase(("packing",)),
}


@dataclass
class Tally:
    """Of one phase."""

    kills: int = 0
    hits: int = 0  # of those, in that phase: it had begun, and its end was never noted
    in_save: int = 0  # of all, that left a checkpoint half made or half removed
    invalid: list[str] = field(default_factory=list)  # published checkpoints that fail verification or hold other bytes
    updates_lost: list[int] = field(default_factory=list)  # for each kill
    ends: int = 0  # runs that were killed there, and came to their end
    different: list[str] = field(default_factory=list)  # what in them is not as the undisturbed run has it

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Tally)))


class Killer:
    """Starts runs of one script with the same flags, and kills them. `processes` take part in each; the last one is killed."""

    def __init__(self, server: ForkServer, script: str, flags: list, folder: Path, *, seed: int, processes: int = 1):
        self.server, self.folder, self.processes = server, folder, processes
        self.flags, self.script, self.generator = flags, script, random.Random(seed)
        self.marks, self.trace, self.whole = folder / "phases", folder / "trace", folder / "whole"
        self.runs = 0
        self.lengths: dict[str, float] = {}
        seconds = []
        for output_dir in (self.whole, folder / "again", folder / "again"):  # the last one resumes at its end
            start = time.monotonic()
            runs = self.start(output_dir)
            assert {run.wait() for run in runs} == {0}, runs[0].text()
            self.lengths |= phase_lengths(self.marks)
            seconds.append(time.monotonic() - start)
        self.lengths["any moment"] = seconds[1]  # of a whole run that has its data packed already
        assert not differences(folder / "again", self.whole)

    def start(self, output_dir: Path, fault: tuple = ("none",), flags: tuple = ()) -> list[Run]:
        for path in (self.marks, self.trace):
            path.unlink(missing_ok=True)
        command = ["tests/faults/inject.py", self.script, *fault, "--record", self.trace, "--phases", self.marks, "--"]
        resume = ["--resume_from_checkpoint", "latest", "--checkpoints_total_limit", 2] if output_dir != self.whole else []
        return self.server.start([*command, *self.flags, *flags, *resume, "--output_dir", output_dir], self.processes)

    def kill_by_phase(self, plan: dict[str, int]) -> dict[str, Tally]:
        """Kills as often in each of PHASES as `plan` says; each run is resumed with `latest` until it comes to its end."""
        plan, tallies = Counter(plan), {name: Tally() for name in plan}
        while +plan:
            self.runs += 1
            folder, struck = self.folder / f"disturbed-{self.runs}", []
            while True:
                kind = RESUMED if newest(folder) else FRESH
                possible = [name for name in +plan if kind in PHASES[name].starts]
                if not possible and kind == FRESH:  # the phases that are left need a checkpoint to resume from
                    self.strike(folder, "any moment", Tally())
                    continue
                if not possible:
                    runs = self.start(folder)
                    assert {run.wait() for run in runs} == {0}, runs[0].text()
                    break
                [name] = self.generator.choices(possible, [plan[name] for name in possible])
                killed = [self.strike(folder, name, tallies[name]) for _ in range(1 + (name == TWICE))]
                plan[name] -= sum(killed)
                struck += [name] * sum(killed)
                if not killed[-1]:
                    break
            different = differences(folder, self.whole)
            for name in set(struck):
                tallies[name].ends += 1
                tallies[name].different += [f"{folder.name}: {what}" for what in different]
            shutil.rmtree(folder)
        return tallies

    def strike(self, folder: Path, name: str, tally: Tally) -> bool:
        """Whether the run was killed before its end."""
        phase, before, half_done = PHASES[name], newest(folder), saves_under_way(folder)
        if "packing" in phase.open:
            self.unpack()
        runs = self.start(folder)
        while not set(phase.open) <= open_phases(self.marks) and runs[0].poll() is None:
            time.sleep(0.0005)
        wait(runs[-1], self.generator.uniform(0, self.lengths[phase.open[-1] if phase.open else name]))
        runs[-1].kill()
        at = time.monotonic()
        if runs[-1].status == 0:
            assert {run.wait() for run in runs} == {0}, runs[0].text()
            return False
        assert runs[-1].status == -9, runs[-1].text()
        for run in runs[:-1]:
            run.wait()  # the others leave by themselves
        tally.kills += 1
        tally.hits += set(phase.open) <= open_phases(self.marks, at)
        tally.in_save += not saves_under_way(folder) <= half_done
        done = before + self.updates()
        tally.updates_lost.append(max(0, done - newest(folder)))
        tally.invalid += invalid_checkpoints(folder, self.whole)
        return True

    def updates(self) -> int:
        """That the newest start has begun."""
        return self.trace.read_text().count("\n") // self.processes if self.trace.exists() else 0

    def unpack(self) -> None:
        """Removes the packed images, but not what a killed start has left of them."""
        for pixels in list(Path(self.flags[self.flags.index("--cache_dir") + 1]).rglob("images.bin")):
            pixels.unlink()


# ---- what takes long, and kills nobody: what went wrong in such a run, or in the one that resumed it


def suspended(killer: Killer, folder: Path, hang_timeout: int, seconds: float) -> list[str]:
    """The last rank stops (SIGSTOP) for so long, or until the others have left, and then goes on."""
    runs = killer.start(folder, flags=("--hang_timeout", hang_timeout, "--collective_timeout", 20))
    moment = killer.generator.randrange(4, 22)
    while killer.updates() < moment:
        assert runs[0].poll() is None, runs[0].text()
        time.sleep(0.001)
    wait(runs[0], killer.generator.uniform(0, 0.1))
    runs[-1].send_signal(signal.SIGSTOP)
    wait(runs[0], seconds)
    runs[-1].send_signal(signal.SIGCONT)
    statuses, said = [run.wait() for run in runs], "\n".join(run.text() for run in runs)
    if seconds < hang_timeout:
        problems = [] if set(statuses) == {0} and "hang:" not in said else [f"{statuses}: {said[-2000:]}"]
        return problems + differences(folder, killer.whole)
    named = f"rank {killer.processes - 1} does not answer" in said or "Timed out waiting 20000ms" in said  # not in an update
    problems = [] if named and not {0, 2, 3, 75} & set(statuses) else [f"{statuses}: {said[-2000:]}"]
    return problems + invalid_checkpoints(folder, killer.whole) + resumed(killer, folder)


def frozen(killer: Killer, folder: Path, hang_timeout: int, seconds: float) -> list[str]:
    """The disk takes nothing of rank 0 for so long."""
    fault = ("disk-frozen", "--step", killer.generator.randrange(3, 22), "--value", seconds)
    runs = killer.start(folder, fault, ("--hang_timeout", hang_timeout))
    statuses, said = [run.wait() for run in runs], "\n".join(run.text() for run in runs)
    problems = [] if set(statuses) == {0} and "hang:" not in said else [f"{statuses}: {said[-2000:]}"]
    return problems + differences(folder, killer.whole)


def clock_set_back(killer: Killer, folder: Path, seconds: float) -> list[str]:
    """In an update; and before the start that resumes, after a kill."""
    runs = killer.start(folder, ("clock", "--step", killer.generator.randrange(3, 12), "--value", seconds))
    while newest(folder) < 15:
        assert runs[0].poll() is None, runs[0].text()
        time.sleep(0.001)
    runs[-1].kill()
    for run in runs:
        run.wait()
    problems = invalid_checkpoints(folder, killer.whole)
    return problems + resumed(killer, folder, ("clock", "--step", 0, "--value", 2 * seconds))


DELAYS = {
    "one of two ranks stops for 3 s (--hang_timeout 10)": partial(suspended, hang_timeout=10, seconds=3),
    "one of two ranks stops until the other has left (--hang_timeout 5)": partial(suspended, hang_timeout=5, seconds=60),
    "the disk takes nothing of rank 0 for 10 s (--hang_timeout 5)": partial(frozen, hang_timeout=5, seconds=10),
    "the clock is set back by an hour in an update, and again before a resume": partial(clock_set_back, seconds=3600),
}


def resumed(killer: Killer, folder: Path, fault: tuple = ("none",)) -> list[str]:
    runs = killer.start(folder, fault)
    statuses = {run.wait() for run in runs}
    return [f"{statuses}: {runs[0].text()[-2000:]}"] * (statuses != {0}) + differences(folder, killer.whole)


# ---- the phases, as inject.py notes them


def read_marks(path: Path) -> list[tuple[str, str, float]]:
    """(+ or -, the phase, when) of each line."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(line[0], line[1:].split()[0], float(line.split()[1])) for line in lines]


def open_phases(path: Path, at: float = math.inf) -> set[str]:
    """The phases that have begun and not ended, at that time."""
    balance = Counter()
    for sign, name, when in read_marks(path):
        balance[name] += (1 if sign == "+" else -1) if when <= at else 0
    return {name for name, count in balance.items() if count > 0}


def phase_lengths(path: Path) -> dict[str, float]:
    """The seconds that each phase of PHASES took: their median."""
    lengths, began = defaultdict(list), {}
    for sign, name, when in read_marks(path):
        if sign == "+":
            began[name] = when
        else:
            lengths[name].append(when - began[name])
    return {name: statistics.median(seconds) for name, seconds in lengths.items()}


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


def invalid_checkpoints(folder: Path, whole: Path) -> list[str]:
    """Problems of the published checkpoints: what verification says, and bytes other than those of the undisturbed run."""
    problems = []
    for path in list_checkpoints(folder):
        if problem := verify_checkpoint(path):
            problems.append(f"{path.name}: {problem}")
        problems += [f"{path.name}: {name} differs" for name in BYTES if not same(path / name, whole / path.name / name)]
    return problems


def differences(folder: Path, whole: Path) -> list[str]:
    """What a finished run has that differs from the undisturbed one: bytes of the last checkpoint, of the export and of
    snapshots of the averaged weights, the ledger, curves."""
    last = list_checkpoints(whole)[-1].name
    snapshots = [f"ema_snapshots/{path.name}" for path in whole.glob("ema_snapshots/*.safetensors")]
    names = [f"{last}/{name}" for name in BYTES] + [EXPORTED, *snapshots]
    different = [name for name in names if not same(folder / name, whole / name)]
    different += ["ledger.jsonl"] * (hashes(folder) != hashes(whole))
    return different + [tag for tag in TAGS if logged_scalars(folder, tag) != logged_scalars(whole, tag)]


def hashes(folder: Path) -> list[dict]:
    """The lines of the ledger, without the time at which they were written."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def same(first: Path, second: Path) -> bool:
    return first.is_file() and same_bytes(first, second)
