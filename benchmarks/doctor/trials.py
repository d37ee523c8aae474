"""What audit.py and watch.py share: edits of files, runs in processes of their own, and their diagnosis.json."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

TIMEOUT_SECONDS = 400


@dataclass(frozen=True)
class Edit:
    """`old` occurs once in the file; see `edited`."""

    file: str
    old: str
    new: str


def edited(text: str, edits: list[Edit]) -> str:
    """`text` with all edits of one file. Raises ValueError where an `old` does not occur exactly once: the line has changed."""
    places = []
    for edit in edits:
        if (count := text.count(edit.old)) != 1:
            raise ValueError(f"{edit.file} has {count} times, not once: {edit.old!r}")
        places.append((text.index(edit.old), edit))
    for start, edit in sorted(places, key=lambda place: place[0], reverse=True):
        text = text[:start] + edit.new + text[start + len(edit.old) :]
    return text


def apply(edits: tuple[Edit, ...], folder: Path) -> None:
    """Raises ValueError where a line is no longer what it was, SyntaxError where the edited file is no Python."""
    for file in dict.fromkeys(edit.file for edit in edits):
        text = edited((folder / file).read_text(), [edit for edit in edits if edit.file == file])
        compile(text, file, "exec")
        (folder / file).write_text(text)


def problems(faults: dict, folder: Path) -> list[str]:
    """What is wrong with the edits of the faults, each under its name, as the files in `folder` are now."""
    found = []
    for name, fault in faults.items():
        try:
            for file in dict.fromkeys(edit.file for edit in fault.edits):
                text = (folder / file).read_text()
                changed = edited(text, [edit for edit in fault.edits if edit.file == file])
                compile(changed, file, "exec")
                if changed == text:
                    found.append(f"{name}: {file} stays as it is")
        except (ValueError, SyntaxError, OSError) as error:
            found.append(f"{name}: {error}")
    return found


def words_of(flags: dict) -> list[str]:
    words = []
    for flag, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *(value if isinstance(value, list) else [value])]
    return [str(word) for word in words]


def run_in(folder: Path, words: list[str], log: Path, more: dict[str, str] | None = None) -> int | None:
    """Exit status, None where the time ran out; the run and all that it started are ended then. `more`: of its environment."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"TQDM_MININTERVAL": "60", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    environment |= more or {}
    with open(log, "a") as file:
        output = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **output)
        try:
            return process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            for number, seconds in ((signal.SIGTERM, 35), (signal.SIGKILL, 10)):  # a launcher passes the first on
                os.killpg(process.pid, number)
                try:
                    process.wait(seconds)
                    break
                except subprocess.TimeoutExpired:
                    pass
            return None


def run_cases(cases: list, run: Callable, line: Callable[..., str], jobs: int, json_file: Path | None = None) -> list:
    """`run(case, number)` of each case, `jobs` at a time, told as they end; the results in the order of the cases, which
    `json_file` gets too."""
    start, results = time.monotonic(), {}
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, case, number): number for number, case in enumerate(cases)}
        for future in as_completed(futures):
            result = results[futures[future]] = future.result()
            print(line(result), *([result.error] if result.error else []), sep="\n", flush=True)
    print(f"\n{len(results)} runs in {time.monotonic() - start:.0f} s, {jobs} at a time, on {os.cpu_count()} cores")
    ordered = [results[number] for number in sorted(results)]
    if json_file:
        json_file.write_text(json.dumps([asdict(result) | {"right": result.right} for result in ordered], indent=1) + "\n")
    return ordered


def keep_run(output_dir: Path, log: Path, kept: Path, leaves_out: tuple[str, ...]) -> None:
    """What a run recorded and printed; `leaves_out`: patterns of files that are not kept."""
    if output_dir.exists():
        shutil.copytree(output_dir, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*leaves_out))
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(log, kept / "log.txt")


def findings_of(output_dir: Path) -> list[dict]:
    """Those of diagnosis.json above "info", in its order; none where there is no such file."""
    try:
        findings = json.loads((output_dir / "diagnosis.json").read_text())
    except (OSError, ValueError):
        return []
    names = ("code", "severity", "stage", "declared", "observed", "evidence", "step")
    return [{name: found.get(name) for name in names} for found in findings if found.get("severity") != "info"]


def told(finding: dict) -> str:
    return f"{finding['code']} [{finding['stage']}]" if finding["stage"] else finding["code"]


def share(results: list) -> str:
    """How many of the results are right."""
    right = sum(result.right for result in results)
    return f"{right} of {len(results)} ({right / len(results):.1%})" if results else "none run"
