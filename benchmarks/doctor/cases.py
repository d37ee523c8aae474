"""What is asked: the faults and healthy runs of the TOML files (README.md has their format), as cases, one for each run."""

import hashlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.doctor.edits import Edit, changed_files
from benchmarks.doctor.images import CHANNELS, TEXT

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
FAULTS, FOREIGN, BLIND = HERE / "faults", HERE / "foreign", HERE / "blind"
OURS = ("train_ddpm.py", "train_edm2.py")
STAGES = ("data", "noise", "timestep", "input", "condition", "network", "target", "weight", "gradient", "optimizer")
STAGES += ("learning_rate", "ema", "state", "ranks", "export")
OF_FILE = {"script", "flags", "kinds", "first_half", "shipped", "seeded", "environment", "healthy", "fault"}
OF_RUN = {"name", "flags", "processes", "resumed", "datasets"}
OF_HEALTHY = OF_RUN | {"note"}
OF_FAULT = OF_RUN | {
    "stages",
    "codes",
    "harm",
    "source",
    "written",
    "blind",
    "first",
    "unfair",
    "imbalanced",
    "edits",
    "variants",
}


@dataclass(frozen=True)
class Case:
    """One run. `stages` and `codes`: of findings that would be right; a healthy run has none."""

    script: str
    name: str
    flags: dict
    stages: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    processes: int = 1
    unfair: bool = False
    seed: int = 0
    blind: bool = False  # of the blind set
    seeded: bool = True  # two runs print the same losses
    environment: dict = field(default_factory=dict)
    # Of our scripts alone.
    dataset: str = ""
    imbalanced: bool = False
    resumed: bool = False
    first_half: dict = field(default_factory=dict)  # flags

    @property
    def title(self) -> str:
        places = f" / {self.dataset} / {self.seed}" if self.dataset else f" / {self.seed}" * bool(self.seed)
        return f"{self.script.removesuffix('.py')}: {self.name}{places}"

    @property
    def key(self) -> str:
        """Of all that the run depends on but the scripts."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        """Where the script lies, and the files that are edited."""
        return ROOT if self.script in OURS else BLIND if self.blind else FOREIGN


def read(file: Path) -> dict:
    """One TOML file. Raises ValueError for a key, a stage or a name that cannot be."""
    content = tomllib.loads(file.read_text())
    wrong = [str(key) for key in content.keys() - OF_FILE]
    wrong += [f"{one.get('name')}: {key}" for one in content.get("healthy", ()) for key in one.keys() - OF_HEALTHY]
    for fault in content.get("fault", ()):
        wrong += [f"{fault.get('name')}: {key}" for key in fault.keys() - OF_FAULT]
        wrong += [f"{fault.get('name')}: stage {stage}" for stage in set(fault.get("stages", ["none"])) - set(STAGES)]
    names = [fault.get("name") for fault in content.get("fault", ())]
    wrong += [f"two faults of the name {name}" for name in {name for name in names if names.count(name) > 1}]
    if wrong:
        raise ValueError(f"{file.name}: {'; '.join(sorted(wrong))}")
    return content


def faults_of(file: dict, blind: bool = False) -> Iterator[list[Case]]:
    """Of each fault, its cases by seed: one for each variant, in turn with each kind of run; datasets are not chosen yet."""
    for fault in file.get("fault", ()):
        variants = fault.get("variants", [{}])
        kinds = file.get("kinds", [{}])
        cases = []
        for seed in range(max(len(variants), len(kinds))):
            variant = variants[seed % len(variants)]
            flags = file["flags"] | kinds[seed % len(kinds)] | fault.get("flags", {}) | variant.get("flags", {})
            edits = [
                Edit(edit.get("file", file["script"]), edit["old"], edit["new"])
                for edit in variant.get("edits", fault.get("edits", ()))
            ]
            expected = {"stages": tuple(fault["stages"]), "codes": tuple(fault.get("codes", ()))}
            cases.append(_case(file, fault, flags, blind, **expected, edits=tuple(edits), seed=seed))
        yield cases


def healthy_of(file: dict, blind: bool = False) -> Iterator[Case]:
    for run in file.get("healthy", ()):
        words = " ".join(f"{key} {value}" for key, value in run.get("flags", {}).items())
        pair = "two processes" if run.get("processes", 1) > 1 else ""
        name = run.get("name") or " ".join(filter(None, (words, pair))) or "as usual"
        yield _case(file, run | {"name": f"healthy: {name}"}, file["flags"] | run.get("flags", {}), blind)


def _case(file: dict, run: dict, flags: dict, blind: bool, **more) -> Case:
    alike = {name: run[name] for name in ("processes", "unfair", "imbalanced", "resumed") if name in run}
    alike |= {name: file[name] for name in ("seeded", "environment", "first_half") if name in file}
    return Case(file["script"], run["name"], flags, blind=blind, **alike, **more)


def on_datasets(run: dict, number: int, seed: int, every: bool = False) -> list[str]:
    """The data sets that the `number`-th run of a script of ours is trained on: the next for the next seed, or every one."""
    possible = run.get("datasets") or list(CHANNELS)
    if "stages" not in run:  # healthy
        number += number // len(possible)
        if run.get("flags", {}).get("random_flip"):
            possible = [name for name in possible if name not in TEXT]  # of which mirrored images are a fault
    return possible if every else [possible[(number + seed) % len(possible)]]


def problems(cases: list[Case], folder: Path | None = None) -> list[str]:
    """What is wrong with the edits, as the files are now; `folder`: of scripts that are not shipped."""
    found = []
    for case in cases:
        try:
            changed_files(case.edits, folder or case.folder)
        except (ValueError, SyntaxError, OSError) as error:
            found.append(f"{case.title}: {error}")
    return found
