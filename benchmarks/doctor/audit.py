"""Does the doctor name what is wrong? Puts a fault into a script, trains, and reads diagnosis.json.

    python benchmarks/doctor/audit.py --jobs 2 --json audit.json                        # all faults, healthy runs: hours
    python benchmarks/doctor/audit.py --stages ema state --seeds 0 --healthy 0          # the faults of two stages
    python benchmarks/doctor/audit.py --faults "EMA decay squared" "lambda missing" --healthy 0 --every_dataset
    python benchmarks/doctor/audit.py --faults --healthy 96                             # healthy runs alone
    python benchmarks/doctor/audit.py --check                                           # seconds: do all edits still apply?

A fault of step_faults.py or more_step_faults.py is an edit of a copy of the repository, in which the real script then trains a
small network in a process of its own, or in two; one of faults.py or later_faults.py is a function, a flag or a data set that
faulty_run.py puts in its place. A fault counts as found when the first or the second finding that is more than "info" has the
stage that was expected. A healthy run must have no such finding. Nothing of the doctor is called here: a run's diagnosis.json
is all that is read.
"""

import argparse
import compileall
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.doctor.faults import FAULTS
from benchmarks.doctor.later_faults import LATER_FAULTS
from benchmarks.doctor.more_step_faults import STEP_FAULTS
from benchmarks.doctor.step_data import CHANNELS, OF_OTHER_KINDS, flags_of, make_dataset
from benchmarks.doctor.step_faults import DDPM
from benchmarks.doctor.step_kinds import (
    BASES,
    EPSILON_LINEAR,
    FIRST_HALF,
    KINDS,
    PAIR_BATCH,
    RESUMED,
    SAMPLE_LINEAR,
    V_COSINE,
    healthy_runs,
    network_config,
)
from benchmarks.doctor.trials import Edit, apply, findings_of, keep_run, problems, run_cases, run_in, share, told, words_of

ROOT = Path(__file__).parents[2]
# What an update does to the weights; the other stages are data, noise, timestep, condition, network, learning_rate and export.
IDENTITIES = ("input", "target", "weight", "gradient", "optimizer", "ema", "state", "ranks")
OLDER_FAULTS = FAULTS | LATER_FAULTS
OLDER_KINDS = (EPSILON_LINEAR, V_COSINE, SAMPLE_LINEAR)  # one for each seed, in turn
# Smaller images and a larger network know 32 images by heart in half a minute.
OVERFIT = {"resolution": 8, "network": "large", "train_batch_size": 32, "learning_rate": 3e-3, "max_train_steps": 600}
OVERFIT |= {"logging_steps": 30, "validation_images": 64, "validation_steps": 100, "save_images_steps": 300}
DIFFUSION_FLAGS = {"prediction_type", "ddpm_beta_schedule", "snr_gamma"}
LEAVES_OUT = ("checkpoint-*", "*.safetensors", "cache", "ema_snapshots")  # of the runs' folders that --keep keeps
ENDED = (0, 3)  # well, or diverged
TEXT = ("digits", "letters")  # of which mirrored images are a fault
AUTOENCODER, LATENT_CHANNELS, AUTOENCODER_UPDATES = "autoencoder", 2, 100
OF_FINE_TUNING = ("pretrained", "train_only", "learning_rate")
OF_PIPELINES = ("model_config_name_or_path", "vae", "latent_scale")  # which --pretrained brings


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # "new", "older" or "healthy"
    dataset: str
    seed: int
    script: str
    flags: dict
    stages: tuple[str, ...] = ()  # of which one is expected; none for a healthy run
    code: str | None = None  # of the finding that is expected, where that has no stage
    edits: tuple[Edit, ...] = ()
    processes: int = 1
    resumed: bool = False
    imbalanced: bool = False

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.dataset}-{self.seed}".replace("/", "_")


@dataclass
class Result:
    name: str
    kind: str
    script: str
    dataset: str
    seed: int
    stages: tuple[str, ...]
    code: str | None
    findings: list[dict] = field(default_factory=list)  # those above "info", the first first
    status: int | None = None  # of the script; None: no end in time
    seconds: float = 0.0
    error: str = ""  # the end of what a run that failed printed

    @property
    def right(self) -> bool:
        if not self.stages:
            return self.status == 0 and not self.findings
        first = self.findings[:2]
        return any(finding["stage"] in self.stages or (self.code and finding["code"] == self.code) for finding in first)


# ---- what is run


def new_case(name: str, seed: int, dataset: str) -> Case:
    fault = STEP_FAULTS[name]
    kind = KINDS[fault.script][seed % len(KINDS[fault.script])]
    if DIFFUSION_FLAGS & fault.flags.keys():
        kind = {key: value for key, value in kind.items() if key != "rescale_betas_zero_snr"}
    flags = BASES[fault.script] | kind | ({"train_batch_size": PAIR_BATCH} if fault.processes > 1 else {})
    flags |= (RESUMED if fault.resumed else {}) | fault.flags
    of_run = {"edits": fault.edits, "processes": fault.processes, "resumed": fault.resumed}
    return Case(name, "new", dataset, seed, fault.script, flags, fault.stages, **of_run)


def older_case(name: str, seed: int, dataset: str) -> Case:
    fault = OLDER_FAULTS[name]
    flags = BASES[DDPM] | OLDER_KINDS[seed % len(OLDER_KINDS)] | fault.flags(seed)
    if flags.pop("overfit", False):
        flags |= OVERFIT
    return Case(name, "older", dataset, seed, DDPM, flags, fault.stages, fault.code, imbalanced=fault.imbalanced)


def healthy_case(name: str, number: int, dataset: str) -> Case:
    run = healthy_runs()[name]
    flags = BASES[run.script] | ({"train_batch_size": PAIR_BATCH} if run.processes > 1 else {})
    flags |= (RESUMED if run.resumed else {}) | run.flags
    return Case(name, "healthy", dataset, number, run.script, flags, processes=run.processes, resumed=run.resumed)


def cases(
    faults: list[str],
    healthy: int,
    seeds: list[int],
    datasets: list[str],
    every_dataset: bool = False,
    named: list[str] | None = None,
) -> list[Case]:
    """Each fault with each seed on one data set, the next one for the next seed, or on every one of them. `named`: the healthy
    runs of these names."""
    chosen = []
    for number, name in enumerate(faults):
        make, possible = older_case, datasets
        if name in STEP_FAULTS:
            make, possible = new_case, [d for d in datasets if d in (STEP_FAULTS[name].datasets or datasets)]
        for seed in seeds if possible else ():
            of_seed = possible if every_dataset else [possible[(number + seed) % len(possible)]]
            chosen += [make(name, seed, dataset) for dataset in of_seed]
    names = list(healthy_runs())
    count = min(healthy, len(names))
    for position in range(count):  # spread over the table
        number = position * len(names) // count
        flips = healthy_runs()[names[number]].flags.get("random_flip")
        possible = [name for name in datasets if name not in TEXT] if flips else datasets
        alone = healthy_runs()[names[number]].dataset
        if (alone or possible) and (named is None or names[number] in named):
            dataset = alone or possible[(number + number // len(possible)) % len(possible)]
            chosen.append(healthy_case(names[number], number, dataset))
    return chosen


# ---- the copies of the repository


def copy_repository(folder: Path) -> None:
    """What git knows of the working tree, and new files that it does not ignore; compiled, so that each run need not."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH  # a file that is edited is compiled anew
    compileall.compile_dir(folder, quiet=2, invalidation_mode=by_content)


# ---- the runs


def command(case: Case, work: Path, output_dir: Path, more: dict) -> list[str]:
    flags = dict(case.flags)
    network = work / f"{case.script}-{flags.pop('network', 'tiny')}"
    data = work / f"{case.dataset}{'-imbalanced' if case.imbalanced else ''}"
    # Packed images depend on the data and the flags; here they depend on the code too.
    places = {"model_config_name_or_path": network, "cache_dir": output_dir / "cache", "output_dir": output_dir}
    channels = flags.get("image_channels") or (CHANNELS | OF_OTHER_KINDS)[case.dataset]
    flags = flags_of(case.dataset, data) | {"image_channels": channels} | flags | places | {"seed": case.seed} | more
    if flags.get("vae"):
        flags["vae"], channels = work / AUTOENCODER, LATENT_CHANNELS
    write_config(network, case.script, channels, flags["resolution"])
    flags["model_config_name_or_path"] = network / f"{channels}-{flags['resolution']}"
    if flags.get("pretrained"):
        flags["pretrained"] = first_of(output_dir)
        flags = {name: value for name, value in flags.items() if name not in OF_PIPELINES}
    words = words_of(flags)
    if case.kind == "older":
        return [sys.executable, "benchmarks/doctor/faulty_run.py", case.name, str(case.seed), "--", *words]
    if case.processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.processes}"]
        return [*launcher, case.script, *words]
    return [sys.executable, case.script, *words]


def first_of(output_dir: Path) -> Path:
    """Where the pipeline is trained that a run starts from."""
    return output_dir.with_name(f"{output_dir.name}-first")


def train_autoencoder(folder: Path) -> None:
    """A small one of the digits, in a process of its own: torch is not needed else."""
    code = (
        "import sys; from benchmarks.quality.latents import digits, train_autoencoder;"
        f"train_autoencoder(digits(), {AUTOENCODER_UPDATES}).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def write_config(folder: Path, script: str, channels: int, resolution: int) -> None:
    place = folder / f"{channels}-{resolution}"
    place.mkdir(parents=True, exist_ok=True)
    config = network_config(script, folder.name.removeprefix(f"{script}-"))
    config |= {"sample_size": resolution, "in_channels": channels, "out_channels": channels}
    draft = place / f".{time.monotonic_ns()}"  # two cases at once may write the same
    draft.write_text(json.dumps(config))
    os.replace(draft, place / "config.json")


def run_case(case: Case, number: int, work: Path, keep: Path | None) -> Result:
    start = time.monotonic()
    output_dir, log, tree = work / f"run-{number}", work / f"run-{number}.log", work / "repository"
    try:
        if case.edits:
            tree = work / f"tree-{number}"
            shutil.copytree(work / "repository", tree)
            apply(case.edits, tree)
        status, resume = 0, {}
        if case.flags.get("pretrained"):
            plain = {name: value for name, value in case.flags.items() if name not in OF_FINE_TUNING}
            first = replace(case, flags=BASES[case.script] | plain | {"max_train_steps": 100})
            status = run_in(work / "repository", command(first, work, first_of(output_dir), {}), log)
        if case.resumed:
            status = run_in(work / "repository", command(case, work, output_dir, FIRST_HALF), log)
            resume = {"resume_from_checkpoint": "latest"}
        if status == 0:
            status = run_in(tree, command(case, work, output_dir, resume), log)
        about = (case.name, case.kind, case.script, case.dataset, case.seed, case.stages, case.code)
        error = "" if status in ENDED else log.read_text(errors="replace")[-1500:]
        result = Result(*about, findings_of(output_dir), status, time.monotonic() - start, error)
        if keep is not None:
            keep_run(output_dir, log, keep / case.folder, LEAVES_OUT)
        return result
    finally:
        for folder in (output_dir, first_of(output_dir)):
            shutil.rmtree(folder, ignore_errors=True)
        if case.edits:
            shutil.rmtree(tree, ignore_errors=True)


def run_all(chosen: list[Case], jobs: int = 2, keep: Path | None = None, json_file: Path | None = None) -> list[Result]:
    """Runs them, `jobs` at a time; `keep` gets what each recorded and printed."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        copy_repository(work / "repository")
        if any(case.flags.get("vae") for case in chosen):
            train_autoencoder(work / AUTOENCODER)
        for dataset, imbalanced in {(case.dataset, case.imbalanced) for case in chosen}:
            make_dataset(dataset, work / f"{dataset}{'-imbalanced' if imbalanced else ''}", imbalanced)
        return run_cases(chosen, lambda case, number: run_case(case, number, work, keep), line, jobs, json_file)


# ---- the tables


def line(result: Result) -> str:
    verdict = "ok   " if result.right else "WRONG"
    ended = "" if result.status in ENDED else f", ended with {result.status}"
    found = ", ".join(map(told, result.findings)) or "nothing"
    expected = f" expected {' or '.join(result.stages)};" if result.stages else ""
    return f"{verdict} {result.name} / {result.dataset} / {result.seed} ({result.seconds:.0f} s{ended}):{expected} {found}"


def of_stages(results: list[Result], stages: tuple[str, ...]) -> list[Result]:
    """By the first of the stages that were expected of a fault."""
    return [result for result in results if result.stages[0] in stages]


def summary(results: list[Result]) -> str:
    faulty = [result for result in results if result.stages]
    healthy = [result for result in results if not result.stages]
    text = []
    if faulty:
        text.append("\n| fault | expected | found | usual first finding | declared | observed |\n|---|---|---|---|---|---|")
    for name in dict.fromkeys(result.name for result in faulty):
        runs = [result for result in faulty if result.name == name]
        first = Counter(told(result.findings[0]) if result.findings else "nothing" for result in runs).most_common(1)[0][0]
        named = [f for result in runs for f in result.findings if f["stage"] in result.stages] or [{}]
        values = [str(named[0].get(key) or "-").replace("|", "/") for key in ("declared", "observed")]
        row = (name, " or ".join(runs[0].stages), f"{sum(r.right for r in runs)} of {len(runs)}", first, *values)
        text.append(f"| {' | '.join(row)} |")
    if faulty:
        text.append(f"\nFound, the first or the second finding naming the stage: {share(faulty)} runs.")
        text.append(f"Of the stages {', '.join(IDENTITIES)}: {share(of_stages(faulty, IDENTITIES))}.")
        for kind in ("new", "older"):
            text.append(f"Of the {kind} faults: {share([result for result in faulty if result.kind == kind])}.")
        text.append("\n| stage | found |\n|---|---|")
        for stage in sorted({result.stages[0] for result in faulty}):
            text.append(f"| {stage} | {share(of_stages(faulty, (stage,)))} |")
    if healthy:
        alarms = [result for result in healthy if result.findings]
        text.append(f"\nHealthy runs: {len(healthy)}, with a finding above info: {len(alarms)}.")
        text += [line(result) for result in alarms]
    failed = [result for result in results if result.status not in ENDED]
    if failed:
        text.append(f"\nDid not run to their end: {len(failed)}.")
        text += [line(result) for result in failed]
    return "\n".join(text)


def main() -> int:
    everything = STEP_FAULTS | OLDER_FAULTS
    stages = sorted({stage for fault in everything.values() for stage in fault.stages})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="*", default=list(everything), choices=list(everything), metavar="NAME", help="(all)")
    parser.add_argument("--group", choices=("all", "new", "older"), default="all", help="of the faults (all)")
    parser.add_argument("--stages", nargs="+", choices=stages, metavar="STAGE", help=f"of {', '.join(stages)} (all)")
    parser.add_argument("--scripts", nargs="+", choices=list(BASES), default=list(BASES), help="(both)")
    parser.add_argument("--healthy", type=int, default=1000, metavar="N", help="as many healthy runs, over the table (all)")
    parser.add_argument("--named", nargs="+", choices=list(healthy_runs()), metavar="NAME", help="of the healthy runs (all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--datasets", nargs="+", default=list(CHANNELS), choices=list(CHANNELS))
    parser.add_argument("--every_dataset", action="store_true", help="each fault on each data set, not on one for each seed")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes every run's findings there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keeps what the runs recorded and printed there")
    parser.add_argument("--check", action="store_true", help="runs nothing: tells which edits no longer apply")
    args = parser.parse_args()
    if args.check:
        found = problems(STEP_FAULTS, ROOT)
        print("\n".join([*found, f"{len(STEP_FAULTS)} faults, {len(found)} with an edit that does not apply"]))
        return bool(found)
    faults = [name for name in args.faults if args.group == "all" or (name in STEP_FAULTS) == (args.group == "new")]
    if args.stages:
        faults = [name for name in faults if everything[name].stages[0] in args.stages]
    chosen = cases(faults, args.healthy, args.seeds, args.datasets, args.every_dataset, args.named)
    chosen = [case for case in chosen if case.script in args.scripts]
    print(summary(run_all(chosen, args.jobs, args.keep, args.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
