"""The doctor: finds what is wrong with a run, a pipeline or a dataset, and says what to try.

    python diagnose.py runs/digits                                      # a run; writes report.html
    python diagnose.py --pipeline runs/digits --dataset_name digits     # any unconditional diffusers pipeline, on real images
    python diagnose.py --dataset_name uoft-cs/cifar10 --resolution 32   # the data alone, before the training
    python diagnose.py --compare runs/a runs/b                          # the first update at which two runs differ
    python diagnose.py --watch my_train.py --its_flags ...              # any training script; --watch is the last flag

Exit status: 0 no findings; 1 findings; 2 it could not run. Findings for information do not count; with --fail_on critical, nor
do warnings. With --compare: 0 the same bits as far as both runs went; 1 they differ; 2 they cannot be compared. With --watch,
it is that of the script; with --fail_on, a script that ends with 0 gets 1 for findings, and 2 if nothing was judged.
"""

import json
import os
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.entrypoint import loading_libraries, run_script
from utils.core.errors import UserError
from utils.core.files import make_folder
from utils.core.size import Size
from utils.options.flags import DiagnoseOptions
from utils.options.parser import parse_options

if TYPE_CHECKING:
    from utils.data.dataset import ImageSet
    from utils.runs.record import RunRecord


def parse_args(argv: list[str] | None = None) -> DiagnoseOptions:
    return parse_options(DiagnoseOptions, __doc__, _split(argv)[0])


def _split(argv: list[str] | None) -> tuple[list[str], list[str]]:
    """(our arguments, those of the script that --watch names)"""
    words = sys.argv[1:] if argv is None else argv
    ends = [place + 1 + (word == "--watch") for place, word in enumerate(words) if word.split("=")[0] == "--watch"]
    end = min(ends, default=len(words))
    return words[:end], words[end:]


def main(args: DiagnoseOptions) -> int:
    # Imported here because torch takes seconds, which --help and a mistyped flag should not pay for.
    if args.watch is not None:
        from steady_doctor.run import watch_script

        for name in [name for name in sys.modules if name.split(".")[0] in ("utils", "models")]:
            del sys.modules[name]  # the script may have modules of these names
        script, flags = Path(args.watch), _split(None)[1]
        most = args.watch_updates
        sys.exit(watch_script(script, flags, args.watch_dir, most_updates=most, shows_all=args.all, fail_on=args.fail_on))
    if args.compare:
        from utils.runs.compare import compare

        comparison = compare(*args.compare)
        print(json.dumps(vars(comparison), indent=2) if args.json else "\n".join(comparison.lines()))
        return comparison.status
    if args.report_dir is not None:
        make_folder(args.report_dir, "--report_dir")
    with loading_libraries(args):
        from utils.diagnostics import diagnose as diagnostics
        from utils.diagnostics.finding import DIAGNOSIS, any_at_least, write_findings
        from utils.diagnostics.report.report import REPORT, write_report
        from utils.runs.record import RunRecord

    folder = args.report_dir
    if args.run is not None:
        record, folder = RunRecord.read(args.run), None if args.no_report else args.run
    else:
        record = RunRecord(args.report_dir or Path(), history=[{"step": 0, **records_of(args)}])
    findings, judged = diagnostics.judge(record)
    report = folder and folder / REPORT
    if folder is not None:
        try:
            write_report(record, findings, folder / REPORT)
            if args.run is not None:
                write_findings(folder / DIAGNOSIS, findings)
        except OSError as error:  # the findings are worth having without
            report = None
            print(f"note: no report: cannot write {folder}: {error.strerror or error}", file=sys.stderr)
    if args.run is not None and not record.history:
        raise UserError(
            f"{args.run} has no history.jsonl: the run has not recorded anything yet\n"
            "try again after its first --logging_steps updates"
        )
    try:
        show(record, findings, judged, args, report)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads it has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(any_at_least(findings, args.fail_on or "warning"))


def records_of(args: DiagnoseOptions) -> dict:
    """Returns the records (as in history.jsonl) that can be made of a dataset, and of a pipeline on it."""
    with loading_libraries(args):
        from utils.diagnostics.data_check import check_data
        from utils.diagnostics.data_checks.kept import records_of_images

    if args.pipeline is None:
        images = load(args, args.resolution, args.image_channels)
        return records_of_images(images, None, seed=args.seed, random_flip=None, folder=args.report_dir)

    import numpy as np
    import torch

    from utils.data.augmentation import to_unit_range
    from utils.diagnostics.probe import examine_modules, probe_network
    from utils.diffusion.ddpm import describe_schedule
    from utils.diffusion.pipelines import image_shape, load_unconditional, training_scheduler
    from utils.evaluation.newest import loadable

    unet, scheduler_config = load_unconditional(loadable(args.pipeline))
    channels, *size = image_shape(unet)
    images = load(args, Size(*size).resolution, channels)
    noise_scheduler = training_scheduler(scheduler_config)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    unet.to(device).eval()
    count = min(args.probe_images, len(images))
    chosen = np.linspace(0, len(images) - 1, count).astype(np.int64)  # spread over the set
    batch = to_unit_range(torch.from_numpy(images.fetch(chosen)).to(device), images.max_value)
    return {
        "data": check_data(images, seed=args.seed),
        "schedule": describe_schedule(noise_scheduler),
        "network": examine_modules(unet),
        "probe": probe_network(unet, noise_scheduler, batch, args.seed),
    }


def load(args: DiagnoseOptions, resolution: int | str, image_channels: int) -> "ImageSet":
    from utils.core.bars import Bar
    from utils.data.dataset import load_images

    own: dict[str, Any] = {"resolution": resolution, "image_channels": image_channels}
    own |= {"on_bad_image": "replace", "max_bad_images": sys.maxsize}  # the doctor counts bad images, however many
    with Bar("reading the images") as bar:
        return load_images(replace(args, **own), bar.set)


def show(record: "RunRecord", findings: list, judged: set[str], args: DiagnoseOptions, report: Path | None) -> None:
    """What was looked at, with --all each check and figure; then the findings, with cause and fixes. `report`: the page."""
    from utils.diagnostics.finding import CATALOG, printed_lines
    from utils.diagnostics.rules.training import measured, recorded_updates
    from utils.runs.history import to_json

    found = {finding.code for finding in findings}
    healthy = [code for code in CATALOG if code in judged - found]
    figures = {kind: record.records(kind)[-1][1] for kind in ("data", "schedule", "probe") if record.records(kind)}
    if args.json:
        shown = {"findings": [vars(finding) for finding in findings], "healthy": sorted(healthy)}
        print(json.dumps(to_json(shown | figures), indent=2))
        return
    # Of a dataset or a pipeline most is missing, and some options have no meaning for a run.
    missing = CATALOG.keys() - judged - found - {"rule-failed"} if record.options else set()
    missing = {code for code in missing if not code.startswith("option-")}
    lines = _run_lines(record) if record.options else []
    lines.append(f"{len(healthy)} checks found nothing" + f", {len(missing)} had too few figures" * bool(missing))
    if count := recorded_updates(record):
        stages = ", ".join(measured(record)).replace("_", " ")
        lines.append(f"the training step was measured in {count} update{'s' * (count != 1)}: {stages}")
    lines += [f"report: {report}"] if report else []
    lines += [] if args.all else ["all checks and figures: --all"]
    print(*lines, sep="\n", end="\n\n")
    if args.all:
        print(*_all_lines(healthy, missing, figures), sep="\n", end="\n\n")
    print(*printed_lines(findings), sep="\n")


def _all_lines(healthy: list[str], missing: set[str], figures: dict) -> list[str]:
    """Each check and each figure."""
    from utils.diagnostics.finding import CATALOG

    lines: list[str] = []
    for word, before, codes in (("OK", "", healthy), ("-", "not enough was recorded to judge: ", missing)):
        text = before + ", ".join(code for code in CATALOG if code in codes)
        if codes:
            lines += textwrap.wrap(text, 110, initial_indent=f"{word:<6}", subsequent_indent=" " * 6, break_on_hyphens=False)
    for kind, said in (("data", "data (values as the network sees them, in [-1, 1])"), ("probe", "probe")):
        if kind in figures:
            lines += ["", said, *_figure_lines(figures[kind])]
    return lines


def _run_lines(record: "RunRecord") -> list[str]:
    """How far the run is, and what the doctor could not see of it."""
    from utils.diagnostics.report.report import run_state, updates_done

    done, total = updates_done(record), record.resolved.get("max_train_steps") or 0
    reports = len(record.series("train/loss")[0])
    state, plural = run_state(record, done, total)[0].lower(), "s" * (reports != 1)
    lines = [f"{record.output_dir}: {state}, {done} of {total} updates, {reports} report{plural}"]
    if reports < 4:
        lines.append("with fewer than 4 reports, what is OK now may still go wrong")
    if record.unreadable:
        lines.append(f"{record.unreadable} damaged lines of history.jsonl are left out")
    return lines


def _figure_lines(figures: dict) -> list[str]:
    from utils.diagnostics.report.page import cell, figure_name, flatten

    return [f"  {figure_name(key)}: {cell(value)}" for key, value in flatten(figures).items()]


if __name__ == "__main__":
    run_script(main, parse_args, crash_status=2)  # 1 says that something was found
