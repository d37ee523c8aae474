"""Asks the doctor about options alone: the faults of option_faults.py must be named, the published recipes must pass.

    python benchmarks/doctor/options.py            # prints what was missed and what was flagged, and the counts

Nothing is trained. The flags are parsed as the scripts parse them; of a data set the doctor is told what its data check says.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.doctor.option_faults import DDPM, FAULTS, RECIPES, Case
from utils.diagnostics.diagnose import diagnose
from utils.diagnostics.finding import Finding
from utils.diffusion.ddpm import describe_schedule, scheduler_of
from utils.options.flags import DDPMOptions, EDM2Options
from utils.options.parser import parse_options
from utils.runs.record import RunRecord
from utils.training.length import RunLength


def record_of(case: Case) -> RunRecord:
    """What a run of this command line has recorded before its first update."""
    options = parse_options(DDPMOptions if case.script == DDPM else EDM2Options, "", case.flags.split())
    if options.global_batch_size:
        options.gradient_accumulation_steps = options.global_batch_size // options.train_batch_size
    images, history = case.images, {"step": 0}
    length = RunLength.of(options, images.images, num_processes=1)
    values = options.image_channels * options.resolution**2
    resolved = {**length._asdict(), "training_images": images.images, "validation_images": images.validation}
    epsilon = options.adam_epsilon / (1 if case.script == DDPM else values)
    resolved |= {"parameters": case.parameters, "optimizer_epsilon": epsilon, "classes": images.classes}
    history["data"] = {
        "images": images.images,
        "mean": [images.mean] * options.image_channels,
        "std": [images.std] * options.image_channels,
        "min": -1.0,
        "max": 1.0,
        "sizes": {"shorter_side_median": images.shorter_side},
    }
    if case.script == DDPM:
        history["schedule"] = describe_schedule(scheduler_of(options))
    return RunRecord(Path(), options=vars(options), resolved=resolved, history=[history])


def above_info(case: Case) -> list[Finding]:
    return [finding for finding in diagnose(record_of(case)) if finding.severity != "info"]


def main() -> int:
    found, flagged = 0, 0
    for name, case in FAULTS.items():
        lines = above_info(case)
        if {finding.code for finding in lines[:2]} & set(case.codes):
            found += 1
        else:
            print(f"missed: {name}: {[finding.code for finding in lines]}, expected {case.codes}")
    for name, case in RECIPES.items():
        lines = above_info(case)
        flagged += bool(lines)
        for finding in lines:
            print(f"flagged: {name}: {finding.line}")
    print(f"{found} of {len(FAULTS)} bad combinations named; {flagged} of {len(RECIPES)} recipes with a finding above info")
    return 0


if __name__ == "__main__":
    sys.exit(main())
