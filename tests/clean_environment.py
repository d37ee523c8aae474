"""Tests know nothing of who runs them, and where. When this is imported, the environment keeps only what finds programs and
what decides how a CPU computes. Caches, tokens, settings of launchers and trackers, and a home with files would change results.
"""

import os
import shutil
import site
import tempfile
from pathlib import Path

PROGRAMS = "PATH LD_ LANG LC_ TMPDIR USER VIRTUAL_ENV CONDA PYTHONPATH PYTHONHOME PYTEST COV CI"  # what their names begin with
ARITHMETIC = "OMP_ MKL_ OPENBLAS_ ATEN_ ONEDNN_ CUDA_"

if "PYTEST_HOME" not in os.environ:  # else a worker of xdist, which has this environment from the process that started it
    user_packages = site.getuserbase()
    for name in [name for name in os.environ if not name.startswith(tuple(f"{PROGRAMS} {ARITHMETIC}".split()))]:
        del os.environ[name]
    os.environ["PYTHONUSERBASE"] = user_packages  # it is in the home of whoever runs this
    os.environ["PYTEST_HOME"] = os.environ["HOME"] = tempfile.mkdtemp(prefix="home-of-tests-")
HOME = Path(os.environ["PYTEST_HOME"])
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the workers share the cores
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests fork after torch has counted the GPUs, and compare bits that GPUs do not repeat
os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which tries an unreachable network for a minute


def remove_home() -> None:
    shutil.rmtree(HOME, ignore_errors=True)
