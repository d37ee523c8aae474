"""One run of benchmarks/diagnosis.py: `python diagnosis_run.py FAULT SEED -- FLAGS` trains with that fault in it, or "none"."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from diagnosis_faults import FAULTS
from diagnosis_later_faults import LATER_FAULTS

import utils.export
from utils.script import run_script

if __name__ == "__main__":
    fault, seed = sys.argv[1], int(sys.argv[2])
    sys.argv = ["train_ddpm.py", *sys.argv[sys.argv.index("--") + 1 :]]
    import train_ddpm

    # Before its first update a run refuses networks that its export would not hold: here the doctor alone is asked.
    utils.export.check_export = lambda *arguments: None
    patch = None if fault == "none" else (FAULTS | LATER_FAULTS)[fault].patch
    if patch is not None:
        patch(seed)
    run_script(train_ddpm.main, train_ddpm.parse_args)
