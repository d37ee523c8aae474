"""Asks about what needs no edit: data sets (sets.toml), by a training of one update on them, and options (options.toml), by the
folder that a run of them leaves before its first update."""

import io
import json
import sys
import time
import tomllib
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.doctor import engine
from benchmarks.doctor.cases import Case
from benchmarks.doctor.runs import Result, Workplace, run_in, words_of
from benchmarks.doctor.sets import damages, pictures

HERE = Path(__file__).parent
SETS, OPTIONS = "data set", "options"  # the "scripts" of such cases
PICTURES = {"images": 0, "mean": -0.05, "std": 0.5, "shorter_side": 256, "classes": 0, "validation": 0}
PARAMETERS = 100_000_000
RUN = {"max_train_steps": 1, "train_batch_size": 4, "lr_warmup_steps": 0, "save_images_steps": 9, "cpu_threads": 1}


def set_cases(seeds: list[int]) -> list[Case]:
    """Each fault in each of its sources (seed 0: its middle strength, 1: the strong, 2: the weak one); then healthy sets."""
    cases = []
    for fault in tomllib.loads((HERE / "sets.toml").read_text())["fault"]:
        for source in fault["sources"]:
            how = {"damage": fault["damage"], "source": source, "info": fault.get("info", False), "name": fault["name"]}
            codes = tuple(fault["codes"])
            cases += [Case(SETS, f"{fault['name']} / {source}", how, codes=codes, seed=seed % 3) for seed in seeds]
    return cases + [Case(SETS, f"healthy: {source}", {"source": source, "name": source}) for source in pictures.HEALTHY]


def option_cases() -> list[Case]:
    file = tomllib.loads((HERE / "options.toml").read_text())
    cases = []
    for kind in ("fault", "healthy"):
        for one in file[kind]:
            how = {name: one[name] for name in ("script", "flags", "images", "parameters") if name in one}
            name = f"{'healthy: ' * (kind == 'healthy')}{one['name']}"
            cases.append(Case(OPTIONS, name, how, codes=tuple(one.get("codes", ()))))
    return cases


def problems() -> list[str]:
    """What no longer fits together: names of functions, command lines."""
    found = []
    for case in set_cases([0]):
        if case.flags["source"] not in pictures.HEALTHY or not hasattr(damages, case.flags.get("damage", "each")):
            found.append(f"{case.title}: no such set, or no such damage")
    for case in option_cases():
        try:
            parsed(case)
        except Exception as error:
            found.append(f"{case.title}: {error}")
    return found


def run(place: Workplace, case: Case, number: int) -> Result:
    result = Result(case.title, case.script, [], list(case.codes), False, False, case.key)
    start = time.monotonic()
    (_run_set if case.script == SETS else _run_options)(place, case, place.folder / f"run-{number}", result)
    result.seconds = round(time.monotonic() - start, 1)
    return result


# ---- data sets


def _run_set(place: Workplace, case: Case, output: Path, result: Result) -> None:
    strength = (1, 2, 0)[case.seed]
    named = f"{case.flags['name']}{case.flags['source']}{strength if case.codes else None}"
    rng = np.random.default_rng(zlib.crc32(named.encode()))
    made = pictures.HEALTHY[case.flags["source"]](rng)
    if case.codes:
        made = getattr(damages, case.flags["damage"])(made, rng, strength)
    data, channels = output.with_name(f"{output.name}-set"), 3 if any(image.ndim == 3 for image in made.images) else 1
    store(made, data)
    flags: dict[str, Any] = RUN | {"dataset_name": data, "resolution": made.resolution, "image_channels": channels}
    flags |= {"random_flip": True} if made.random_flip else {}
    flags |= {"class_conditional": True} if made.labels is not None else {}
    flags["validation_images"] = made.held_out
    flags |= {"model_config_name_or_path": place.network("train_ddpm.py", "tiny", channels, made.resolution)}
    flags |= {"output_dir": output, "cache_dir": output / "cache"}
    log = output.with_suffix(".log")
    result.status = run_in(place.tree, [sys.executable, "train_ddpm.py", *words_of(flags)], log)
    found = engine.findings(output, info=case.flags.get("info", False))
    result.findings = found and [one for one in found if one["code"].startswith(engine.ABOUT_DATA)]
    result.first = len(result.findings or [])  # wherever it stands
    if not result.ended:
        result.error = log.read_text(errors="replace")[-1500:]


def store(made: pictures.Pictures, folder: Path) -> None:
    """As `datasets` saves it; the last `held_out` stand where a run of seed 0 holds images out."""
    import datasets
    import torch

    from utils.core import randomness

    count = len(made.images)
    places = torch.arange(count)
    shuffled = randomness.permute(0, "validation split", torch.zeros_like(places), places, count).numpy()
    order = np.empty(count, int)
    held_out = np.sort(shuffled[: made.held_out])
    order[held_out] = np.arange(count - made.held_out, count)
    order[np.setdiff1d(np.arange(count), held_out)] = np.arange(count - made.held_out)
    features, rows = {"image": datasets.Image()}, {"image": [{"bytes": png(made.images[i]), "path": None} for i in order]}
    if made.labels is not None:
        features["label"] = datasets.ClassLabel(names=made.class_names)
        rows["label"] = [int(made.labels[i]) for i in order]
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(str(folder))


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


# ---- options


def parsed(case: Case) -> Any:
    """The options, as the script of the case reads its command line."""
    from utils.options.flags import DDPMOptions, EDM2Options
    from utils.options.parser import parse_options

    options = DDPMOptions if case.flags["script"] == "train_ddpm.py" else EDM2Options
    return parse_options(options, "", case.flags["flags"].split())


def record_of(case: Case) -> tuple[dict, dict, dict]:
    """(options, what follows from them, first line of the history) of a run of this command line before its first update."""
    from utils.diffusion.ddpm import describe_schedule, scheduler_of
    from utils.training.length import RunLength

    options, images, ours = parsed(case), PICTURES | case.flags["images"], case.flags["script"] == "train_ddpm.py"
    if options.global_batch_size:
        options.gradient_accumulation_steps = options.global_batch_size // options.train_batch_size
    length = RunLength.of(options, images["images"], num_processes=1)
    resolved = {**length._asdict(), "training_images": images["images"], "validation_images": images["validation"]}
    epsilon = options.adam_epsilon / (1 if ours else options.image_channels * options.resolution**2)
    resolved |= {"parameters": case.flags.get("parameters", PARAMETERS), "optimizer_epsilon": epsilon}
    resolved |= {"classes": images["classes"]}
    data = {"images": images["images"], "min": -1.0, "max": 1.0, "sizes": {"shorter_side_median": images["shorter_side"]}}
    data |= {"mean": [images["mean"]] * options.image_channels, "std": [images["std"]] * options.image_channels}
    schedule = {"schedule": describe_schedule(scheduler_of(vars(options)))} if ours else {}
    return vars(options), resolved, {"step": 0, "data": data} | schedule


def _run_options(place: Workplace, case: Case, output: Path, result: Result) -> None:
    output.mkdir()
    options, resolved, first = record_of(case)
    (output / "options.json").write_text(json.dumps({"options": options, "resolved": resolved}, default=str))
    (output / "history.jsonl").write_text(json.dumps(first) + "\n")
    log = output.with_suffix(".log")
    status = run_in(place.tree, engine.about_run(place.tree, output), log)
    result.status = 0 if status in engine.ANSWERED else status
    result.findings = engine.findings(output, log.read_text())
    if not result.ended:
        result.error = log.read_text()[-1500:]
