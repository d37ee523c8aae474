"""Does the doctor name what is wrong, and is it silent about what is right? Faults and healthy runs are data: see README.md.

    python benchmarks/doctor/ask.py --check                                   # seconds: do all edits still apply?
    python benchmarks/doctor/ask.py --json all.json                           # all faults and healthy runs: hours
    python benchmarks/doctor/ask.py "edm:*" "train_ddpm: EMA*"                # those of these names
    python benchmarks/doctor/ask.py --stages ema state --only faults --sample 20
    python benchmarks/doctor/ask.py --of blind --json blind.json              # for figures, never to tune on
    python benchmarks/doctor/ask.py --of sets options --json data.json        # data sets, and options of the command line

A fault is an edit of a copy of a script, which then trains for seconds in a process of its own. It counts as found when the
first or the second finding above "info" has a stage that was expected. A healthy run must have no such finding; one of a script
that is not ours must also print what it prints without the doctor, to the last bit. Nothing of the doctor is imported:
engine.py says how it is asked, and reads what it left. A `--json` file that is there is gone on with: what it has is not asked
again. diffusers' train_unconditional.py is not shipped: `--unconditional` names a copy; without it its runs are left out.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, fields, replace
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.doctor import runs
from benchmarks.doctor.cases import BLIND, FAULTS, OURS, Case, faults_of, healthy_of, on_datasets, problems, read
from benchmarks.doctor.runs import Result, Workplace
from benchmarks.doctor.sets import asked


def cases_of(folder: Path, seeds: list[int], every_dataset: bool = False, unconditional: bool = False) -> list[Case]:
    """All cases of the TOML files of `folder`. Of a fault with several kinds of runs or forms, those of `seeds`."""
    chosen: list[Case] = []
    for path in sorted(folder.glob("*.toml")):
        file, blind = read(path), folder == BLIND
        if not (file.get("shipped", True) or unconditional):
            continue
        ours = file["script"] in OURS
        for number, (fault, by_seed) in enumerate(zip(file.get("fault", ()), faults_of(file, blind))):
            for seed in seeds if len(by_seed) > 1 else [0]:
                case = replace(by_seed[seed % len(by_seed)], seed=seed)
                on = on_datasets(fault, number, seed, every_dataset) if ours else [""]
                chosen += [replace(case, dataset=dataset) for dataset in on]
        for number, (run, case) in enumerate(zip(file.get("healthy", ()), healthy_of(file, blind))):
            on = on_datasets(run, number, 0)[0] if ours else ""
            chosen.append(replace(case, dataset=on, seed=number if ours else 0))
    return chosen


def named(case: Case, name: str) -> bool:
    return case.title.startswith(name) or fnmatch(case.title, f"{name}*")


def selected(cases: list[Case], args: argparse.Namespace) -> list[Case]:
    chosen = [case for case in cases if not args.names or any(named(case, name) for name in args.names)]
    if args.stages:
        chosen = [case for case in chosen if not case.stages or case.stages[0] in args.stages]
    if args.only:
        chosen = [case for case in chosen if bool(case.stages or case.codes) == (args.only == "faults")]
    by_hash = sorted(range(len(chosen)), key=lambda number: chosen[number].key)[: args.sample]
    return [chosen[number] for number in sorted(by_hash)]


def ask(cases: list[Case], run: Callable[[Case, int], Result], jobs: int, file: Path | None) -> list[Result]:
    """Runs them, `jobs` at a time; the results in the order of the cases. `file` has what is known, and gets each new one."""
    known = {one["key"]: one for one in json.loads(file.read_text())["results"]} if file and file.exists() else {}
    names = [one.name for one in fields(Result)]
    results = {key: Result(**{name: known[key][name] for name in names}) for key in {case.key for case in cases} & known.keys()}
    left, start = [case for case in cases if case.key not in results], time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, case, number): case for number, case in enumerate(left)}
        for future in as_completed(futures):
            if future.exception():  # what is missing is said now, and not when all others are through
                pool.shutdown(wait=False, cancel_futures=True)
            result = results[futures[future].key] = future.result()
            print(line(result), *([result.error] if result.error else []), sep="\n", flush=True)
            if file:
                kept = known | {key: asdict(result) | {"right": result.right} for key, result in results.items()}
                draft = file.with_name(f".{file.name}")
                draft.write_text('{"results": [\n' + ",\n".join(map(json.dumps, kept.values())) + "\n]}\n")
                os.replace(draft, file)
    seconds = time.monotonic() - start
    print(f"\n{len(left)} runs in {seconds:.0f} s, {jobs} at a time, on {os.cpu_count()} cores", end="; ")
    print(f"{len(cases) - len(left)} known before")
    return [results[case.key] for case in cases]


# ---- the tables


def told(finding: dict) -> str:
    return f"{finding['code']} [{finding['stage']}]" if finding["stage"] else finding["code"]


def share(results: list[Result]) -> str:
    right = sum(result.right for result in results)
    return f"{right} of {len(results)} ({right / len(results):.1%})" if results else "none run"


def line(result: Result) -> str:
    ended = "" if result.ended else f", ended with {result.status}"
    ended += "" if result.findings is not None else ", the doctor left nothing"
    if result.seconds_without is not None:
        same = {True: "the same losses", False: "OTHER LOSSES", None: "losses not compared"}[result.same]
        ended += f", {result.seconds_without:.1f} s without the doctor, {same}"
    found = ", ".join(map(told, result.findings or [])) or "nothing"
    expected = f" expected {' or '.join(result.stages + result.codes)};" if result.stages or result.codes else ""
    return f"{'ok   ' if result.right else 'WRONG'} {result.title} ({result.seconds:.1f} s{ended}):{expected} {found}"


def summary(results: list[Result]) -> str:
    faulty = [result for result in results if result.stages or result.codes]
    healthy = [result for result in results if not (result.stages or result.codes)]
    fair, unfair = [r for r in faulty if not r.unfair], [r for r in faulty if r.unfair]
    text = []
    if fair:
        text += [f"\nFound by the first or the second finding: {share(fair)}.", "\n| stage | found |\n|---|---|"]
        of_stage = {result.title: (result.stages or result.codes)[0] for result in fair}
        for stage in sorted(set(of_stage.values())):
            text.append(f"| {stage} | {share([result for result in fair if of_stage[result.title] == stage])} |")
        text.append("\n| script | found |\n|---|---|")
        for script in dict.fromkeys(result.script for result in fair):
            text.append(f"| {script} | {share([result for result in fair if result.script == script])} |")
        text += ["\nMissed:"] * any(not result.right for result in fair) + [line(r) for r in fair if not r.right]
    if unfair:
        text.append(f"\nOf those that only the command line tells: {share(unfair)}.")
    if healthy:
        alarms = [result for result in healthy if result.findings]
        text.append(f"\nHealthy: {len(healthy)}, with a finding above info: {len(alarms)}.")
        text += [line(result) for result in alarms]
        compared = [result for result in healthy if result.seconds_without]
        if compared:
            other = [result for result in compared if result.same is False]
            seeded = sum(result.same is not None for result in compared)
            text.append(f"With other losses than without the doctor: {len(other)} of {seeded}.")
            text += [f"  {result.title}" for result in other]
            more = sum(result.seconds for result in compared) / sum(result.seconds_without or 0 for result in compared) - 1
            text.append(f"Whole runs took {more:+.0%} with the doctor.")
    failed = [result for result in results if not result.ended]
    if failed:
        text += [f"\nDid not run to their end, or the doctor left nothing: {len(failed)}.", *map(line, failed)]
    return "\n".join(text)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help='beginnings of "script: name", with * and ? (all)')
    parser.add_argument("--of", nargs="+", choices=("faults", "blind", "sets", "options"), default=["faults"], help="(faults)")
    parser.add_argument("--only", choices=("faults", "healthy"))
    parser.add_argument("--stages", nargs="+", metavar="STAGE", help="faults of which the first expected stage is one of these")
    parser.add_argument("--sample", type=int, metavar="N", help="as many of them, by a hash (all)")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], help="kinds of runs, forms of faults, strengths of sets (0)"
    )
    parser.add_argument("--every_dataset", action="store_true", help="each fault of our scripts on each data set")
    parser.add_argument("--unconditional", type=Path, metavar="FILE", help="diffusers' train_unconditional.py")
    parser.add_argument("--gpu", action="store_true", help="leaves the GPUs visible; what needs several processes is left out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (as many as cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps every run's findings; what it has is not asked again")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keeps what the runs recorded and printed there")
    parser.add_argument("--check", action="store_true", help="runs nothing: tells which edits no longer apply")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> int:
    if args.check:
        return check(args.unconditional)
    everything = {
        "faults": lambda: cases_of(FAULTS, args.seeds, args.every_dataset, args.unconditional),
        "blind": lambda: cases_of(BLIND, args.seeds),
        "sets": lambda: asked.set_cases(args.seeds),
        "options": asked.option_cases,
    }
    chosen = selected([case for name in args.of for case in everything[name]()], args)
    if args.gpu:
        runs.HIDES_GPUS.clear()
        chosen = [case for case in chosen if case.processes == 1]
    with tempfile.TemporaryDirectory() as folder:
        place = Workplace(Path(folder), chosen, args.unconditional, args.keep)

        def run(case: Case, number: int) -> Result:
            return asked.run(place, case, number) if case.script in (asked.SETS, asked.OPTIONS) else place.run(case, number)

        print(summary(ask(chosen, run, args.jobs, args.json)))
    return 0


def check(unconditional: Path | None) -> int:
    """Prints which edits no longer apply, of those scripts that are there; 1 where there are any."""
    found, count = [], 0
    for path in sorted([*FAULTS.glob("*.toml"), *BLIND.glob("*.toml")]):
        try:
            file = read(path)
            cases = [case for by_seed in faults_of(file, path.parent == BLIND) for case in by_seed]
        except (ValueError, KeyError, TypeError) as error:
            found.append(f"{path.name}: {error!r}")
            continue
        count += len(file.get("fault", ()))
        if file.get("shipped", True):
            found += dict.fromkeys(problems(cases))
        elif unconditional is not None:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copyfile(unconditional, Path(folder, file["script"]))
                found += problems(cases, Path(folder))
    found += asked.problems()
    print("\n".join([*found, f"{count} faults, {len(found)} problems"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(parse_args()))
