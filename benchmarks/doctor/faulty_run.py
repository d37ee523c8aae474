"""One run of audit.py: train_ddpm.py with a fault of faults.py or later_faults.py in it.

python benchmarks/doctor/faulty_run.py "EMA frozen" 0 -- --max_train_steps 160 --output_dir runs/frozen
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import train_ddpm
from benchmarks.doctor.faults import FAULTS
from benchmarks.doctor.later_faults import LATER_FAULTS
from benchmarks.shared.replace import check_fired, replace_everywhere
from utils.core.entrypoint import run_script

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault")
    parser.add_argument("seed", type=int)
    parser.add_argument("flags", nargs="*", help="of train_ddpm.py, after --")
    args = parser.parse_args()
    sys.argv = ["train_ddpm.py", *args.flags]
    # Before its first update a run refuses networks that its export would not hold: here the doctor alone is asked.
    replace_everywhere("utils.diffusion.export.check_export", lambda *arguments: None)
    patch = (FAULTS | LATER_FAULTS)[args.fault].patch
    if patch is not None:
        patch(args.seed)
    run_script(check_fired(train_ddpm.main), train_ddpm.parse_args)
