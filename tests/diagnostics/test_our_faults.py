"""The doctor within our scripts, asked about faults of benchmarks/doctor/faults in tiny runs: each is named by its stage.

Some for each stage, which show themselves within 8 updates of the digits; the benchmark asks all.
"""

import json

import pytest
from conftest import make_tiny_flags, slow_turns

from benchmarks.doctor import cases

DDPM, EDM2 = "train_ddpm.py", "train_edm2.py"
FAULTS = [
    (DDPM, "pixels from 0 to 1"),
    (DDPM, "never mirrored"),
    (DDPM, "noise of the wrong sign"),
    (DDPM, "learning rate of the second group left behind"),
    (DDPM, "EMA of the weights before the step"),
    (DDPM, "raw weights exported"),
    (DDPM, "transforms not told"),
    *(pytest.param(EDM2, name, marks=pytest.mark.slow) for name in ("one noise for the whole batch", "exp(u) multiplied")),
    *slow_turns(
        (DDPM, "network told the next timestep"),
        (DDPM, "square roots missing"),
        (DDPM, "DDPM: labels of the neighbor"),
        (DDPM, "transforms of the neighbor"),
        (DDPM, "trained in evaluation mode"),
        (DDPM, "min-SNR written as max"),
        (DDPM, "gradients cleared in each micro step"),
        (DDPM, "gradients centered"),
        (DDPM, "weights clamped between updates"),
        (DDPM, "sampling starts with half of the noise"),
        (EDM2, "c_in of the variance"),
        (EDM2, "labels one too high"),
        (EDM2, "EDM2: transforms not told"),
        (EDM2, "forced weight normalization before the step"),
        (EDM2, "EMA of twice the width"),
    ),
]


def flags_of(case: cases.Case, of_every_run: dict) -> list:
    """Of the fault itself; the size of the run, and when it validates and saves, is that of a tiny one."""
    own = {name: value for name, value in case.flags.items() if name not in {*of_every_run, "network"} and value is not False}
    return [word for name, value in own.items() for word in (f"--{name}", value) if word is not True]


@pytest.mark.parametrize(("script", "name"), FAULTS)
def test_a_fault_of_our_scripts_is_named_by_its_stage(server, tmp_path, script, name):
    of_script = cases.read(cases.FAULTS / f"{script.removesuffix('.py')}.toml")
    [case] = [variants[0] for variants in cases.faults_of(of_script) if variants[0].name == name]
    (tmp_path / "edits.json").write_text(json.dumps([[edit.file, edit.old, edit.new] for edit in case.edits]))
    rhythm = ["--validation_images", 16, "--validation_steps", 4, "--save_images_steps", 4, "--save_model_steps", 8]
    flags = [*make_tiny_flags(tmp_path, script), *rhythm, *flags_of(case, of_script["flags"]), "--output_dir", tmp_path / "run"]
    [run] = server.start(["tests/faults/edited.py", script, tmp_path / "edits.json", *flags])
    run.wait(200)
    found = [one for one in json.loads((tmp_path / "run" / "diagnosis.json").read_text()) if one["severity"] != "info"]
    assert {one.get("stage") for one in found[:2]} & set(case.stages), run.text()[-3000:]
