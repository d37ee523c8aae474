"""diagnose.py --watch, asked about mutated training loops: a fault is named by its stage, what is right is not accused."""

import json
import shutil
from pathlib import Path

import pytest
from loop_rows import ROWS

from benchmarks.doctor.edits import Edit, edited

LOOPS = Path(__file__).parents[1] / "watched"
FAST = ("plain_ddpm.py", "edm_loop.py", "flow_loop.py")
TABLE = [
    pytest.param(
        script,
        row,
        id=f"{Path(script).stem}-{'+'.join(row.stages) or 'right'}-{number}",
        marks=[pytest.mark.slow] * (script not in FAST or row.updates > 9),
    )
    for script, rows in ROWS.items()
    for number, row in enumerate(rows)
]


@pytest.mark.parametrize(("script", "row"), TABLE)
def test_a_mutation_is_named_by_its_stage_and_what_is_right_is_not_accused(server, tmp_path, script, row):
    shutil.copytree(LOOPS, tmp_path / "loops", ignore=shutil.ignore_patterns("__pycache__"))
    loop = tmp_path / "loops" / script
    loop.write_text(edited(loop.read_text(), [Edit(script, old, new) for old, new in row.edits]))
    [run] = server.start(["diagnose.py", "--watch_dir", tmp_path / "seen", "--watch", loop, row.updates])
    assert run.wait(200) == 0, run.text()[-3000:]
    assert "doctor stopped" not in run.text(), run.text()[-3000:]
    found = [one for one in json.loads((tmp_path / "seen" / "diagnosis.json").read_text()) if one["severity"] != "info"]
    named = [one.get("stage") or one["code"].split("-")[0] for one in found]
    is_right = bool(set(named[:2]) & set(row.stages)) if row.stages else not named
    assert is_right != bool(row.missed), (row.edits, run.text()[-3000:])
    assert all(one["declared"] and one["observed"] for one in found if one.get("stage"))
