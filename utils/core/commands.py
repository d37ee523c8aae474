"""The scripts as commands of a package that pip installed: each runs as it does from a clone, by its path."""

import sys
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path

HOME = Path(__file__).parents[2]  # of the scripts: the top of a clone, or the package


def run(script: str) -> None:
    """As the module `__main__`, which processes that are spawned import; `sys.argv` keeps the command's name, for its usage."""
    sys.path.insert(0, str(HOME))  # as Python does for a script: here its packages are found before others of their names
    main = sys.modules["__main__"]
    main.__file__ = str(HOME / script)
    SourceFileLoader("__main__", main.__file__).exec_module(main)


train_ddpm = partial(run, "train_ddpm.py")
train_edm2 = partial(run, "train_edm2.py")
generate = partial(run, "generate.py")
evaluate = partial(run, "evaluate.py")
diagnose = partial(run, "diagnose.py")
reconstruct_ema = partial(run, "reconstruct_ema.py")
