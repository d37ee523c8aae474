"""The doctor within our scripts, asked about faults of benchmarks/doctor/faults in tiny runs: each is named by its stage.

Some for each stage, which show themselves within 8 updates of the digits; the benchmark asks all.
"""

import json

import pytest
from conftest import THOROUGH, make_tiny_flags

from benchmarks.doctor import cases

FAULTS = {
    "train_ddpm.py": """
        pixels from 0 to 1
        upside down
        never mirrored
        never shuffled
        noise of standard deviation 0.9
        one timestep for the whole batch
        network told the next timestep
        square roots missing
        DDPM: labels of the neighbor
        trained in evaluation mode
        spectral norm left out
        noise of the wrong sign
        velocity of the wrong sign
        min-SNR written as max
        loss summed over the batch
        gradients cleared in each micro step
        gradients centered
        learning rate of the second group left behind
        warm-up left out
        EMA of the weights before the step
        EMA decay of 0.9
        EMA stays in the model
        weights clamped between updates
        raw weights exported
        sampling starts with half of the noise
    """,
    "train_edm2.py": """
        one noise for the whole batch
        c_noise of training is sigma
        c_in of the variance
        labels one too high
        c_skip of the root
        lambda inverted
        exp(u) multiplied
        epsilon of a sum for a mean
        forced weight normalization before the step
        EMA of twice the width
    """,
}
FAST = (
    "pixels",
    "noise of the",
    "learning rate",
    "EMA of the weights",
    "never mirrored",
    "raw weights",
    "one noise",
    "c_in",
    "exp",
)
NAMES = [(script, name.strip()) for script, names in FAULTS.items() for name in names.strip().splitlines()]


def flags_of(case: cases.Case, of_every_run: dict) -> list:
    """Of the fault itself; the size of the run, and when it validates and saves, is that of a tiny one."""
    own = {name: value for name, value in case.flags.items() if name not in {*of_every_run, "network"} and value is not False}
    return [word for name, value in own.items() for word in (f"--{name}", value) if word is not True]


@pytest.mark.parametrize(
    ("script", "name"),
    [
        pytest.param(
            *one, marks=([pytest.mark.slow] if one[0] != "train_ddpm.py" else []) if one[1].startswith(FAST) else THOROUGH
        )
        for one in NAMES
    ],
)
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
