"""The training scripts compute what they computed when tests/bits.py was last run."""

import json

import pytest
from bits import FOLDER, RUNS, SMALL, STEPS, canary, fingerprint, flags_of, resumed
from conftest import slow_turns

RECORDED = json.loads((FOLDER / "bits.json").read_text())


@pytest.fixture(scope="module")
def same_kernels() -> bool:
    return canary() == RECORDED["canary"]


def compare(found: dict, expected: dict, same_kernels: bool, rel: float = 1e-3) -> None:
    if same_kernels:
        assert found == expected
    else:  # rounding, of which gradients see some tens; other noise or another order moves the moments by percents
        assert found.keys() == expected.keys()
        for file, print_ in expected.items():
            assert found[file]["size"] == pytest.approx(print_["size"], rel=rel), file


@pytest.mark.parametrize("name", ["fp32", *slow_turns("accumulation", "bf16", "two processes", "preset")])
@pytest.mark.parametrize("script_of_bits", SMALL)
def test_updates_give_the_recorded_bits(server, tmp_path, same_kernels, script_of_bits, name):
    processes = RUNS[name][1]
    flags = flags_of(name, script_of_bits, tmp_path)
    server.run([script_of_bits, *flags, "--output_dir", tmp_path / "run"], processes)
    compare(
        fingerprint(tmp_path / "run" / f"checkpoint-{STEPS}"),
        RECORDED["runs"][script_of_bits][name],
        same_kernels,
        0.03 if name == "bf16" else 1e-3,
    )


@pytest.mark.parametrize("script_of_bits", SMALL)
def test_a_checkpoint_of_an_earlier_commit_resumes(server, tmp_path, same_kernels, script_of_bits):
    compare(resumed(server, script_of_bits, tmp_path), RECORDED["resumed"][script_of_bits], same_kernels)
