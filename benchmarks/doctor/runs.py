"""Runs a case: edits a copy of the repository or of the foreign scripts, trains, and reads what the doctor left."""

import compileall
import hashlib
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.doctor import engine
from benchmarks.doctor.cases import BLIND, FOREIGN, OURS, ROOT, Case
from benchmarks.doctor.edits import changed_files
from benchmarks.doctor.images import CHANNELS, OF_OTHER_KINDS, flags_of, make_dataset

TIMEOUT_SECONDS = 400
HIDES_GPUS = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
ENDED = (0, 3)  # well, or diverged
LEAVES_OUT = ("checkpoint-*", "*.safetensors", "cache", "ema_snapshots", "trained", "hub")  # of what --keep keeps
AUTOENCODER, LATENT_CHANNELS, AUTOENCODER_UPDATES = "autoencoder", 2, 100
OF_FINE_TUNING = ("pretrained", "train_only", "learning_rate")
OF_PIPELINES = ("model_config_name_or_path", "vae", "latent_scale")  # which --pretrained brings
ON = ("class_conditional", "force_weight_norm", "use_ema")  # flags that are on by default: all others have no form --no-...
WIDTHS = {"tiny": [8, 16], "small": [16, 32], "large": [32, 64]}  # of networks of our scripts
NETWORK = {"sample_size": 16, "in_channels": 3, "out_channels": 3, "block_out_channels": [16, 32], "layers_per_block": 1}
NETWORK |= {"norm_num_groups": 8, "attention_head_dim": 8, "down_block_types": ["DownBlock2D", "AttnDownBlock2D"]}
NETWORK |= {"up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}  # of diffusers' script
# A line with a loss: "12 0.1234", "0: 12 0.1234 0.001", "[1] 12 0.1234 lr 0.001", "loss: 0.1234", "samples 0.9",
# "step 3 loss 0.1", "(step=0000003) Train Loss: 0.1".
PRINTED = re.compile(
    r"(\(step=\d+\) Train |step \d+ )?(\[?\d+[]:]? )?"
    r"(([Ll]oss|samples|preview|validation|evaluation):? )?([-+.e\d]+|inf|nan| |lr)+"
)


@dataclass
class Result:
    """What the doctor said of a run: `findings` above "info", the first first; None where it said nothing at all."""

    title: str
    script: str
    stages: list[str]
    codes: list[str]
    unfair: bool
    blind: bool
    key: str
    findings: list[dict] | None = field(default_factory=list)
    status: int | None = None  # of the script; None: no end in time
    seconds: float = 0.0
    seconds_without: float | None = None  # the doctor, of a healthy foreign run
    same: bool | None = None  # of that: it prints the same with and without
    first: int = 2  # so many of the findings count
    error: str = ""  # the end of what a run that failed printed

    @property
    def ended(self) -> bool:
        return self.status in (ENDED if self.script in OURS else (0,)) and self.findings is not None

    @property
    def right(self) -> bool:
        """One of the first findings names the fault; a healthy run has none, and the same losses."""
        if not (self.stages or self.codes):
            return self.status == 0 and self.findings == [] and self.same is not False
        first = (self.findings or [])[: self.first]
        return any(finding["stage"] in self.stages or finding["code"] in self.codes for finding in first)


def words_of(flags: dict) -> list[str]:
    words: list = []
    for flag, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *(value if isinstance(value, list) else [value])]
    return [str(word) for word in words]


def run_in(folder: Path, words: list[str], log: Path, more: dict[str, str] | None = None) -> int | None:
    """Exit status, None where the time ran out; the run and all that it started are ended then. `more`: of its environment."""
    environment = os.environ | HIDES_GPUS | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_MININTERVAL": "60"}
    paths = [Path(path) for path in environment.pop("PYTHONPATH", "").split(os.pathsep) if path]  # of packages
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if not path.is_relative_to(ROOT))
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


class Workplace:
    """A folder with copies of what is asked, as it is now; `run` edits a copy of them for each case."""

    def __init__(self, folder: Path, cases: list[Case], unconditional: Path | None = None, keep: Path | None = None):
        self.folder, self.tree, self.keep = folder, folder / "repository", keep
        copy_repository(self.tree)
        for source in (FOREIGN, BLIND):
            if source.is_dir():
                shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        if unconditional is not None:
            self._prepare_diffusers(unconditional)
        if any(case.flags.get("vae") for case in cases):
            self._train_autoencoder()
        for dataset, imbalanced in {(case.dataset, case.imbalanced) for case in cases if case.dataset}:
            make_dataset(dataset, self._data(dataset, imbalanced), imbalanced)

    def run(self, case: Case, number: int) -> Result:
        output, log = self.folder / f"run-{number}", self.folder / f"run-{number}.log"
        result = Result(case.title, case.script, list(case.stages), list(case.codes), case.unfair, case.blind, case.key)
        source = self.tree if case.script in OURS else self.folder / case.folder.name
        scripts, start = source, time.monotonic()
        try:
            if case.edits:
                scripts = self.folder / f"scripts-{number}"
                copy_edited(source, scripts, case)
            run = self._run_ours if case.script in OURS else self._run_foreign
            result.status = run(case, scripts, output, log)
            result.seconds = round(time.monotonic() - start, 1)
            result.findings = engine.findings(output)
            if not (case.stages or case.codes) and engine.gave_up(output, log.read_text(errors="replace")):
                result.findings = None  # which is no silence
            if case.script not in OURS and not case.stages and not case.codes:
                self._run_without(case, scripts, output, log, result)
            if not result.ended:
                result.error = log.read_text(errors="replace")[-1500:]
            if self.keep is not None:
                self._keep(case, output, log)
            return result
        except (ValueError, SyntaxError) as error:  # an edit that no longer applies
            return replace(result, findings=None, error=str(error))
        finally:
            for place in (output, first_of(output), *([scripts] if case.edits else [])):
                shutil.rmtree(place, ignore_errors=True)

    # ---- scripts of others

    def _run_foreign(self, case: Case, scripts: Path, output: Path, log: Path, watched: bool = True) -> int | None:
        places = {"folder": scripts, "output": output, "data": self.folder / "data", "network": self.folder / "network"}
        filled = {
            name: value.format_map(places) if isinstance(value, str) else value
            for name, value in (case.flags | case.environment).items()
        }
        script = [str(scripts / case.script), *words_of({name: filled[name] for name in case.flags})]
        words = engine.watched(self.tree, output, script) if watched else script
        return run_in(scripts, [*launcher(case), *words], log, {name: filled[name] for name in case.environment})

    def _run_without(self, case: Case, scripts: Path, output: Path, log: Path, result: Result) -> None:
        """The same run without the doctor, whose losses must be the same to the last bit."""
        plain, plain_log = output.with_name(f"{output.name}-without"), log.with_suffix(".without")
        try:
            start = time.monotonic()
            self._run_foreign(case, scripts, plain, plain_log, watched=False)
            result.seconds_without = round(time.monotonic() - start, 1)
            numbers = trained(plain_log, plain)
            result.same = numbers == trained(log, output) if numbers and case.seeded else None
        finally:
            shutil.rmtree(plain, ignore_errors=True)

    def _prepare_diffusers(self, script: Path) -> None:
        """The script that is not shipped, images for it, and a network."""
        from PIL import Image

        from benchmarks.doctor.foreign.images import shapes

        shutil.copyfile(script, self.folder / FOREIGN.name / "train_unconditional.py")
        (self.folder / "data").mkdir()
        for number, image in enumerate(shapes(256, seed=1)[0]):
            Image.fromarray(image).save(self.folder / "data" / f"{number:03}.png")
        (self.folder / "network").mkdir()
        (self.folder / "network" / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"} | NETWORK))

    # ---- our scripts

    def _run_ours(self, case: Case, scripts: Path, output: Path, log: Path) -> int | None:
        status, resume = 0, {}
        if case.flags.get("pretrained"):
            plain = {name: value for name, value in case.flags.items() if name not in OF_FINE_TUNING}
            first = replace(case, flags=plain | {"max_train_steps": 100})
            status = run_in(self.tree, self._command(first, first_of(output), {}), log)
        if case.resumed:
            status = run_in(self.tree, self._command(case, output, case.first_half), log)
            resume = {"resume_from_checkpoint": "latest"}
        return run_in(scripts, self._command(case, output, resume), log) if status == 0 else status

    def _command(self, case: Case, output: Path, more: dict) -> list[str]:
        flags = dict(case.flags)
        width = flags.pop("network", "tiny")
        channels = flags.get("image_channels") or (CHANNELS | OF_OTHER_KINDS)[case.dataset]
        # Packed images depend on the data and the flags; here they depend on the code too.
        places = {"cache_dir": output / "cache", "output_dir": output, "seed": case.seed}
        flags = (
            flags_of(case.dataset, self._data(case.dataset, case.imbalanced)) | {"image_channels": channels} | flags | places
        )
        if flags.get("vae"):
            flags["vae"], channels = self.folder / AUTOENCODER, LATENT_CHANNELS
        if "model_preset" not in flags:
            flags["model_config_name_or_path"] = self.network(case.script, width, channels, flags["resolution"])
        if flags.get("pretrained"):
            flags["pretrained"] = first_of(output)
            flags = {name: value for name, value in flags.items() if name not in OF_PIPELINES}
        asked = {name: value for name, value in (flags | more).items() if value is not False or name in ON}
        return [*launcher(case), case.script, *words_of(asked)]

    def network(self, script: str, width: str, channels: int, resolution: int | str) -> Path:
        """The folder with the config.json of a network of two levels."""
        place = self.folder / f"{script}-{width}-{channels}-{resolution}"
        place.mkdir(exist_ok=True)
        config: dict = {"sample_size": resolution, "in_channels": channels, "out_channels": channels}
        if script == "train_edm2.py":
            sizes = {"model_channels": WIDTHS[width][0], "channel_multipliers": [1, 2], "layers_per_block": 1}
            config |= {"_class_name": "EDM2UNet", **sizes, "attention_resolutions": [8], "attention_head_dim": 16}
        else:
            blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
            sizes = {"block_out_channels": WIDTHS[width], "layers_per_block": 1, "norm_num_groups": 4}
            config |= {"_class_name": "UNet2DModel", **sizes, **blocks}
        draft = place / f".{time.monotonic_ns()}"  # two cases at once may write the same
        draft.write_text(json.dumps(config))
        os.replace(draft, place / "config.json")
        return place

    def _data(self, dataset: str, imbalanced: bool) -> Path:
        return self.folder / f"{dataset}{'-imbalanced' if imbalanced else ''}"

    def _train_autoencoder(self) -> None:
        """A small one of the digits, in a process of its own: torch is not needed else."""
        code = (
            "import sys; from benchmarks.quality.latents import digits, train_autoencoder;"
            f"train_autoencoder(digits(), {AUTOENCODER_UPDATES}).save_pretrained(sys.argv[1])"
        )
        words = [sys.executable, "-c", code, str(self.folder / AUTOENCODER)]
        environment = os.environ | HIDES_GPUS | {"OMP_NUM_THREADS": "1"}
        subprocess.run(words, cwd=self.tree, env=environment, check=True, stdout=subprocess.DEVNULL)

    def _keep(self, case: Case, output: Path, log: Path) -> None:
        """What a run recorded and printed."""
        kept = self.keep / re.sub(r"\W+", "-", case.title)
        if output.exists():
            shutil.copytree(output, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*LEAVES_OUT))
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, kept / "log.txt")


def launcher(case: Case) -> list[str]:
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.processes}"]
    return [sys.executable, *(many if case.processes > 1 else [])]


def first_of(output: Path) -> Path:
    """Where the pipeline is trained that a run starts from."""
    return output.with_name(f"{output.name}-first")


def copy_repository(folder: Path) -> None:
    """What git knows of the working tree, and new files that it does not ignore; compiled, so that each run need not."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and not name.startswith("tests/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH  # a file that is edited is compiled anew
    compileall.compile_dir(folder, quiet=2, invalidation_mode=by_content)


def copy_edited(source: Path, folder: Path, case: Case) -> None:
    """Links to all files but those that are edited. Raises ValueError and SyntaxError as `changed_files` does."""
    texts = changed_files(case.edits, source)
    shutil.copytree(source, folder, copy_function=os.link)
    for file, text in texts.items():
        (folder / file).unlink()
        (folder / file).write_text(text)


def trained(log: Path, output: Path) -> list[str]:
    """The losses and samples that a run printed, sorted, as two processes print in any order; digests of the weights saved."""
    at_once = re.sub(r"(?<=\w)(?=\[[01]\] |[01]: )", "\n", log.read_text(errors="replace"))  # by two processes
    lines = [line for line in at_once.splitlines() if PRINTED.fullmatch(line) and line[0] != " "]  # " ": of the doctor's table
    saved = sorted((output / "trained").rglob("*.safetensors"))
    return sorted(lines) + [hashlib.sha256(file.read_bytes()).hexdigest() for file in saved]
