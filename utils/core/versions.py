"""Which code runs: the commit of this checkout, and the versions of what it stands on."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("torch", "accelerate", "diffusers", "datasets")


def git_commit() -> str | None:
    """Returns the commit of the checkout that runs, with `+changes` when it has uncommitted ones; None outside a checkout."""
    here = Path(__file__).parent
    try:  # a package may be installed inside another project's checkout
        tracked = ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.run(tracked, capture_output=True, check=True, timeout=10)
        describe = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def library_versions() -> dict[str, str]:
    return {name: version(name) for name in LIBRARIES}


def about_version() -> str:
    """Returns one line for --version."""
    libraries = ", ".join(f"{name} {number}" for name, number in library_versions().items())
    return f"Steady Diffusion, commit {git_commit() or 'unknown'}; Python {platform.python_version()}, {libraries}"
