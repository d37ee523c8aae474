"""Does `diagnose.py --watch` name what is wrong in scripts that are not ours, and is it silent about healthy ones?

    python benchmarks/doctor/watch.py --json watch.json                                   # all of it: an hour or two
    python benchmarks/doctor/watch.py --scripts edm.py mixed_precision.py --healthy 0     # the faults of two scripts
    python benchmarks/doctor/watch.py --faults "edm: c_in missing" --healthy 0 --keep kept
    python benchmarks/doctor/watch.py --faults --healthy 100                              # healthy runs alone
    python benchmarks/doctor/watch.py --unconditional train_unconditional.py --scripts train_unconditional.py
    python benchmarks/doctor/watch.py --check                                             # seconds: do all edits apply?

A fault of watch_faults.py is an edit of a copy of a script in foreign/, which then trains for seconds under the watcher. It
counts as found when the first or the second finding that is more than "info" has a stage that was expected. A healthy run must
have no such finding, and must print what it prints without the watcher, to the last bit: it is run both ways, one after the
other. Nothing of the doctor is imported here: a run's diagnosis.json is all that is read. diffusers' train_unconditional.py is
not shipped: `--unconditional` names a copy; without it its faults are left out.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.doctor.blind_watch_faults import ACCELERATED, MINIMAL
from benchmarks.doctor.foreign.images import shapes
from benchmarks.doctor.later_watch_faults import FILMS, GUIDED, INPAINT, SCORE
from benchmarks.doctor.more_watch_faults import CONTROL, LOGSNR, WAVE
from benchmarks.doctor.newest_watch_faults import NOTEBOOK, POLICY, SIT
from benchmarks.doctor.trials import Edit, apply, findings_of, keep_run, problems, run_cases, run_in, share, told, words_of
from benchmarks.doctor.watch_faults import (
    AMP,
    EDM,
    FLOW,
    HAND,
    LATENTS,
    MODULE,
    PUBLIC,
    UNCONDITIONAL,
    WATCH_FAULTS,
    read_faults,
)
from benchmarks.doctor.watch_faults import SCRIPTS as FIRST_SCRIPTS

ROOT = Path(__file__).parents[2]
FOREIGN = Path(__file__).parent / "foreign"
TUTORIAL, COURSE, TRAINER, EITHER = "tutorial_ddpm.py", "course_loop.py", "trainer_ddpm.py", "edm_flow.py"
SCRIPTS = (*FIRST_SCRIPTS, CONTROL, WAVE, LOGSNR, GUIDED, INPAINT, SCORE, FILMS, NOTEBOOK, SIT, POLICY, MINIMAL, ACCELERATED)
SCRIPTS = (*SCRIPTS, TUTORIAL, COURSE, TRAINER, EITHER)
read_faults(FOREIGN / "faults.json")  # written by people who had not seen the watcher; each says its harm
BASES = {  # what each script is run with
    HAND: {"steps": 48, "sample_every": 20},
    UNCONDITIONAL: {"steps": 48, "preview_steps": 20, "use_ema": True},
    EDM: {"steps": 48, "sample_every": 20, "labels": True},
    FLOW: {"steps": 48, "sample_every": 20},
    LATENTS: {"steps": 48, "validation_steps": 20, "use_ema": True},
    MODULE: {"steps": 48},
    AMP: {"steps": 48, "evaluate_every": 20},
    CONTROL: {"steps": 48},
    WAVE: {"steps": 48},
    LOGSNR: {"steps": 48},
    GUIDED: {"steps": 48},
    INPAINT: {"steps": 48},
    SCORE: {"steps": 48},
    FILMS: {"steps": 48},
    NOTEBOOK: {},
    SIT: {},
    POLICY: {},
    MINIMAL: {"log_every": 1},
    ACCELERATED: {"log_every": 1},
    TUTORIAL: {},
    COURSE: {},
    TRAINER: {},
    EITHER: {},
    PUBLIC: {"resolution": 16, "train_batch_size": 16, "num_epochs": 3, "lr_warmup_steps": 5, "use_ema": True},
}
BASES[PUBLIC] |= {"random_flip": True, "ddpm_num_inference_steps": 3, "eval_batch_size": 2, "learning_rate": 1e-3}
BASES[PUBLIC] |= {"save_images_epochs": 2, "save_model_epochs": 100}
NETWORK = {"sample_size": 16, "in_channels": 3, "out_channels": 3, "block_out_channels": [16, 32], "layers_per_block": 1}
NETWORK |= {"norm_num_groups": 8, "attention_head_dim": 8, "down_block_types": ["DownBlock2D", "AttnDownBlock2D"]}
NETWORK |= {"up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
HEALTHY = (  # script, flags over its usual ones, processes
    (HAND, {}, 1),
    (HAND, {"prediction": "v", "schedule": "cosine"}, 1),
    (HAND, {"prediction": "x0", "loss": "l1"}, 1),
    (HAND, {"loss": "huber", "accumulate": 3}, 1),
    (UNCONDITIONAL, {}, 1),
    (UNCONDITIONAL, {"prediction_type": "v_prediction", "beta_schedule": "squaredcos_cap_v2"}, 1),
    (UNCONDITIONAL, {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "mixed_precision": "bf16"}, 1),
    (UNCONDITIONAL, {"prediction_type": "sample", "snr_gamma": 5.0, "gradient_accumulation_steps": 2}, 1),
    (UNCONDITIONAL, {"snr_gamma": 5.0}, 2),
    (UNCONDITIONAL, {"gradient_accumulation_steps": 2, "lr_scheduler": "constant_with_warmup"}, 2),
    (EDM, {}, 1),
    (EDM, {"rounds": 2, "dropout": 0.1}, 1),
    (FLOW, {}, 1),
    (FLOW, {"times": "lognormal", "bf16": True}, 1),
    (FLOW, {"checkpointing": True, "label_dropout": 0.0, "weight_decay": 0.1}, 1),
    (LATENTS, {}, 1),
    (LATENTS, {"prediction_type": "v_prediction", "snr_gamma": 5.0}, 1),
    (LATENTS, {"noise_offset": 0.1}, 1),
    (LATENTS, {"input_perturbation": 0.1, "gradient_accumulation_steps": 2}, 1),
    (MODULE, {}, 1),
    (MODULE, {"min_snr": True}, 1),
    (MODULE, {"objective": "pred_noise", "schedule": "sigmoid", "accumulate": 2}, 1),
    (MODULE, {"objective": "pred_x0", "amp": "bf16"}, 1),
    (MODULE, {"amp": "fp16", "steps": 16}, 1),
    (AMP, {}, 1),
    (AMP, {"dtype": "bf16", "accumulate": 2, "dropout": 0.1}, 1),
    (AMP, {"dtype": "fp16", "steps": 16}, 1),
    (AMP, {"compile": "aot_eager"}, 1),
    (AMP, {"dtype": "bf16"}, 2),
    (CONTROL, {}, 1),
    (CONTROL, {"snr_gamma": 5.0, "gradient_accumulation_steps": 2}, 1),
    (WAVE, {}, 1),
    (WAVE, {"accumulate": 2}, 1),
    (LOGSNR, {}, 1),
    (LOGSNR, {"micro": 2}, 1),
    (GUIDED, {}, 1),
    (GUIDED, {"use_bf16": True, "microbatch": 8, "lr_anneal_steps": 48}, 1),  # flat float32 copy; falls to 0 at the end
    (GUIDED, {"schedule_sampler": "importance", "class_drop": 0.1}, 1),  # early steps more often, with smaller weights
    (GUIDED, {"diffusion_steps": 250, "clip": 1.0, "weight_decay": 0.05, "ema_rate": "0.5,0.9,0.95"}, 1),  # times 0 to 996
    (INPAINT, {}, 1),
    (INPAINT, {"offset_noise": 0.1, "precision": "bf16"}, 1),
    (INPAINT, {"accumulate_grad_batches": 2, "masked_loss": True}, 1),  # the hole counts ten times as much, mean weight 1
    (INPAINT, {"gradient_clip_val": 0.0, "warm_up_steps": 20, "seed": 3}, 1),
    (SCORE, {}, 1),  # images from 0 to 1, as the authors have them for this process
    (SCORE, {"likelihood_weighting": True, "grad_clip": -1}, 1),  # the weights are one number here; -1: no clipping
    (SCORE, {"functional": True}, 1),  # gradients by torch.func, put into .grad by hand
    (SCORE, {"sde": "vp", "ema_rate": 0.999, "warmup": 30}, 1),
    (FILMS, {}, 1),
    (FILMS, {"bf16": True, "noise_scale": 2.0}, 1),  # stronger noise on purpose, as for larger pictures
    (FILMS, {"accum_iter": 2, "checkpointing": True, "num_workers": 2, "steps": 32}, 1),
    (FILMS, {"P_mean": 0.0, "P_std": 1.0, "label_drop_prob": 0.0, "weight_decay": 0.1, "clip_grad": 0.0}, 1),
    (NOTEBOOK, {}, 1),
    (NOTEBOOK, {"objective": "pred_v", "loss_type": "l2", "schedule": "linear"}, 1),
    (NOTEBOOK, {"gradient_accumulate_every": 2, "dropout": 0.1, "ema_decay": 0.95, "min_snr_gamma": 0}, 1),
    (SIT, {}, 1),
    (SIT, {"prediction": "noise", "precision": "fp32", "ema-decay": 0.95}, 1),
    (SIT, {"path-type": "GVP", "t-sampling": "lognormal", "class-dropout-prob": 0.2, "grad-accum": 2}, 1),
    (POLICY, {}, 1),
    (POLICY, {"prediction_type": "sample", "num_diffusion_iters": 50, "optimizer": "rmsprop", "learning_rate": 3e-4}, 1),
    (POLICY, {"gradient_accumulation_steps": 2, "num_epochs": 2, "mixed_precision": "bf16", "do_mask_loss_for_padding": 0}, 1),
    (MINIMAL, {"class_cond": True, "prediction": "v", "schedule": "cosine", "min_snr_gamma": 5}, 1),
    (MINIMAL, {"accum": 2, "amp": True, "val_every": 8, "dropout": 0.1, "ema_decay": 0.99}, 1),
    (ACCELERATED, {"class_cond": True, "cache_latents": True, "gradient_accumulation_steps": 2}, 1),
    (ACCELERATED, {"mixed_precision": "bf16", "lr_scheduler": "constant_with_warmup", "dropout": 0.1, "sample_every": 16}, 1),
    (ACCELERATED, {"time_shift": 3.0, "weighting": "cosmap", "image_size": 32, "batch_size": 4}, 1),
    (TUTORIAL, {"ema_start": 24, "ema_beta": 0.9}, 1),
    (TUTORIAL, {"amp": "bf16", "accum": 2}, 1),
    (COURSE, {"prediction_type": "v_prediction", "snr_gamma": 5.0, "beta_schedule": "squaredcos_cap_v2"}, 1),
    (COURSE, {"gradient_checkpointing": 1, "mixed_precision": "bf16"}, 1),
    (TRAINER, {"objective": "pred_x0", "min_snr": True}, 1),
    (TRAINER, {"objective": "pred_noise", "offset_noise": 0.1, "beta_schedule": "linear"}, 1),
    (EITHER, {"loss": "flow", "times": "uniform"}, 1),
    (EITHER, {"loss": "edm", "bf16": True, "rounds": 1}, 1),
    (PUBLIC, {}, 1),
    (PUBLIC, {"prediction_type": "sample", "ddpm_beta_schedule": "squaredcos_cap_v2"}, 1),
    (PUBLIC, {"mixed_precision": "bf16"}, 1),
    (PUBLIC, {}, 2),
)
# A line with a loss: "12 0.1234", "0: 12 0.1234 0.001", "[1] 12 0.1234 lr 0.001", "loss: 0.1234", "samples 0.9",
# "step 3 loss 0.1", "(step=0000003) Train Loss: 0.1".
PRINTED = re.compile(
    r"(\(step=\d+\) Train |step \d+ )?(\[?\d+[]:]? )?"
    r"(([Ll]oss|samples|preview|validation|evaluation):? )?([-+.e\d]+|inf|nan| |lr)+"
)


@dataclass(frozen=True)
class Case:
    name: str
    script: str
    flags: dict
    stages: tuple[str, ...] = ()  # of which one is expected; none for a healthy run
    edits: tuple[Edit, ...] = ()
    processes: int = 1
    unfair: bool = False


@dataclass
class Result:
    name: str
    script: str
    stages: tuple[str, ...]
    unfair: bool
    findings: list[dict] = field(default_factory=list)  # those above "info", the first first
    watched: bool = True  # there is a diagnosis.json
    status: int | None = None  # of the script; None: no end in time
    seconds: float = 0.0
    seconds_without: float | None = None  # the watcher, of a healthy run
    same: bool | None = None  # of a healthy run: it prints the same with and without the watcher
    error: str = ""  # the end of what a run that failed printed

    @property
    def right(self) -> bool:
        if not self.stages:
            return self.watched and self.status == 0 and not self.findings and self.same is not False
        return any(finding["stage"] in self.stages for finding in self.findings[:2])


def fault_case(name: str) -> Case:
    fault = WATCH_FAULTS[name]
    flags = BASES[fault.script] | fault.flags
    return Case(name, fault.script, flags, fault.stages, fault.edits, fault.processes, fault.unfair)


def healthy_case(script: str, flags: dict, processes: int) -> Case:
    words = [*words_of(flags), *(["two processes"] if processes > 1 else [])]
    name = f"{script.removesuffix('.py')}: healthy {' '.join(words)}".strip()
    return Case(name, script, BASES[script] | flags, processes=processes)


def cases(faults: list[str], healthy: int, scripts: list[str]) -> list[Case]:
    chosen = [case for case in map(fault_case, faults) if case.script in scripts]
    runs = [run for run in HEALTHY if run[0] in scripts]
    count = min(healthy, len(runs))
    return chosen + [healthy_case(*runs[position * len(runs) // count]) for position in range(count)]


def copy_scripts(folder: Path, unconditional: Path | None) -> None:
    """The scripts and what they import, and the data and the network of the one that needs them."""
    shutil.copytree(FOREIGN, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if unconditional is None:
        return
    from PIL import Image

    shutil.copyfile(unconditional, folder / PUBLIC)
    (folder / "data").mkdir()
    for number, image in enumerate(shapes(256, seed=1)[0]):
        Image.fromarray(image).save(folder / "data" / f"{number:03}.png")
    (folder / "network").mkdir()
    (folder / "network" / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"} | NETWORK))


def command(case: Case, work: Path, folder: Path, output_dir: Path, watched: bool) -> list[str]:
    flags = case.flags
    if case.script == PUBLIC:
        places = {"train_data_dir": work / "scripts" / "data", "model_config_name_or_path": work / "scripts" / "network"}
        flags = flags | places | {"output_dir": output_dir / "trained"}
    script = [str(folder / case.script), *words_of(flags)]
    words = [sys.executable]
    if case.processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.processes}"]
    if watched:
        words += [str(ROOT / "diagnose.py"), "--watch_dir", str(output_dir), "--watch"]
    return [*words, *script]


def trained(log: Path, output_dir: Path) -> list[str]:
    """The losses and samples that a run printed, sorted, as two processes print in any order, or at the same moment; digests of
    the weights saved."""
    text = re.sub(
        r"(?<=\w)(?=\[[01]\] |[01]: )", "\n", log.read_text(errors="replace")
    )  # two processes may print at the same moment
    lines = [line for line in text.splitlines() if PRINTED.fullmatch(line) and line[0] != " "]  # " ": of the watcher's table
    saved = sorted((output_dir / "trained").rglob("*.safetensors"))
    return sorted(lines) + [hashlib.sha256(file.read_bytes()).hexdigest() for file in saved]


def run_case(case: Case, number: int, work: Path, keep: Path | None) -> Result:
    folder, output_dir, log = work / "scripts", work / f"watch-{number}", work / f"run-{number}.log"
    plain_dir = work / f"without-{number}"
    more = {"HF_HOME": str(work / "hub"), "PYTHONPATH": str(work / "scripts" / "stand_ins")} if case.script == PUBLIC else {}
    result = Result(case.name, case.script, case.stages, case.unfair)
    try:
        if case.edits:
            folder = work / f"scripts-{number}"
            shutil.copytree(work / "scripts", folder, ignore=shutil.ignore_patterns("data", "network", "__pycache__"))
            apply(case.edits, folder)
        start = time.monotonic()
        result.status = run_in(folder, command(case, work, folder, output_dir, True), log, more)
        result.seconds = time.monotonic() - start
        result.findings = findings_of(output_dir)
        result.watched = (output_dir / "diagnosis.json").exists()
        if result.status or not result.watched:
            result.error = log.read_text(errors="replace")[-1500:]
        if not case.stages:
            without = work / f"run-{number}-without.log"
            start = time.monotonic()
            run_in(folder, command(case, work, folder, plain_dir, False), without, more)
            result.seconds_without = time.monotonic() - start
            numbers = trained(without, plain_dir)
            seeded = case.script != PUBLIC  # diffusers' script has no seed
            result.same = numbers == trained(log, output_dir) if numbers and seeded else None
        if keep is not None:
            keep_run(output_dir, log, keep / re.sub(r"\W+", "-", case.name), ("trained",))
        return result
    finally:
        for place in (output_dir, plain_dir, *([folder] if case.edits else [])):
            shutil.rmtree(place, ignore_errors=True)


def run_all(
    chosen: list[Case],
    jobs: int = 1,
    keep: Path | None = None,
    unconditional: Path | None = None,
    json_file: Path | None = None,
) -> list:
    """Runs them, `jobs` at a time; `keep` gets what each recorded and printed."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        copy_scripts(work / "scripts", unconditional)
        return run_cases(chosen, lambda case, number: run_case(case, number, work, keep), line, jobs, json_file)


# ---- the tables


def line(result: Result) -> str:
    verdict = "ok   " if result.right else "WRONG"
    ended = "" if result.status == 0 else f", ended with {result.status}"
    ended += "" if result.watched else ", no diagnosis.json"
    if result.seconds_without is not None:
        same = {True: "the same losses", False: "OTHER LOSSES", None: "losses not compared"}[result.same]
        ended += f", {result.seconds_without:.1f} s without the watcher, {same}"
    found = ", ".join(map(told, result.findings)) or "nothing"
    expected = f" expected {' or '.join(result.stages)};" if result.stages else ""
    return f"{verdict} {result.name} ({result.seconds:.1f} s{ended}):{expected} {found}"


def summary(results: list[Result]) -> str:
    faulty = [result for result in results if result.stages]
    healthy = [result for result in results if not result.stages]
    text = []
    if faulty:
        text.append("\n| fault | expected | found | first findings |\n|---|---|---|---|")
    for result in faulty:
        found = ", ".join(map(told, result.findings[:2])) or "nothing"
        text.append(f"| {result.name} | {' or '.join(result.stages)} | {'yes' if result.right else 'no'} | {found} |")
    fair, unfair = [r for r in faulty if not r.unfair], [r for r in faulty if r.unfair]
    if fair:
        text.append(f"\nFound, the first or the second finding naming the stage: {share(fair)}.")
        text.append("\n| stage | found |\n|---|---|")
        for stage in sorted({result.stages[0] for result in fair}):
            text.append(f"| {stage} | {share([result for result in fair if result.stages[0] == stage])} |")
        text.append("\n| script | found |\n|---|---|")
        for script in dict.fromkeys(result.script for result in fair):
            text.append(f"| {script} | {share([result for result in fair if result.script == script])} |")
    if unfair:
        text.append(f"\nOf those that only the command line tells: {share(unfair)}.")
    if healthy:
        alarms = [result for result in healthy if result.findings]
        other = [result for result in healthy if result.same is False]
        compared = sum(result.same is not None for result in healthy)
        text.append(f"\nHealthy runs: {len(healthy)}, with a finding above info: {len(alarms)}.")
        text += [line(result) for result in alarms]
        text.append(f"With other losses than without the watcher: {len(other)} of {compared}.")
        text += [f"  {result.name}" for result in other]
        more = sum(result.seconds for result in healthy) / sum(result.seconds_without for result in healthy) - 1
        text.append(f"Whole runs took {more:+.0%} with the watcher.")
    failed = [result for result in results if result.status != 0 or not result.watched]
    if failed:
        text.append(f"\nDid not run to their end, or left no diagnosis.json: {len(failed)}.")
        text += [line(result) for result in failed]
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--faults", nargs="*", default=list(WATCH_FAULTS), choices=list(WATCH_FAULTS), metavar="NAME", help="(all)"
    )
    parser.add_argument(
        "--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="NAME", help=f"of {', '.join(SCRIPTS)} (all)"
    )
    parser.add_argument(
        "--stages", nargs="+", metavar="STAGE", help="faults of which the first expected stage is one of these (all)"
    )
    parser.add_argument("--healthy", type=int, default=1000, metavar="N", help="as many healthy runs, over the table (all)")
    parser.add_argument("--unconditional", type=Path, metavar="FILE", help="diffusers' train_unconditional.py")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes every run's findings there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keeps what the runs recorded and printed there")
    parser.add_argument("--check", action="store_true", help="runs nothing: tells which edits no longer apply")
    args = parser.parse_args()
    scripts = [script for script in args.scripts if script != PUBLIC or args.unconditional]
    faults = {name: fault for name, fault in WATCH_FAULTS.items() if name in args.faults and fault.script in scripts}
    if args.check:
        with tempfile.TemporaryDirectory() as folder:
            copy_scripts(Path(folder) / "scripts", args.unconditional)
            found = problems(faults, Path(folder) / "scripts")
        print("\n".join([*found, f"{len(faults)} faults, {len(found)} with an edit that does not apply"]))
        return bool(found)
    names = [name for name, fault in faults.items() if not args.stages or fault.stages[0] in args.stages]
    chosen = cases(names, args.healthy, scripts)
    print(summary(run_all(chosen, args.jobs, args.keep, args.unconditional, json_file=args.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
