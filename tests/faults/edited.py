"""Runs a training script with edits, as those of benchmarks/doctor/faults, in a process that has imported what they change.

    python tests/faults/edited.py SCRIPT EDITS FLAGS      # EDITS: a JSON file of [file, old, new]

The code of each function of an edited file takes the place of that of the function as it was imported.
"""

import importlib
import inspect
import json
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

sys.path.insert(1, str(Path(__file__).parents[2]))

from benchmarks.doctor.edits import Edit, changed_files

ROOT = Path(__file__).parents[2]


def functions_of(code: CodeType, owner: object) -> Iterator[tuple[object, CodeType]]:
    """Each function of a module or class, also behind decorators and properties, and the code of its name within `code`."""
    for new in code.co_consts:
        if not isinstance(new, CodeType) or (old := inspect.getattr_static(owner, new.co_name, None)) is None:
            continue
        if inspect.isclass(old):
            yield from functions_of(new, old)
            continue
        function = inspect.unwrap(getattr(old, "__func__", getattr(old, "fget", old)))
        if inspect.isfunction(function):
            yield function, new


def main(script: str, edits: list[Edit], flags: list[str]) -> None:
    for file, text in changed_files(edits, ROOT).items():
        if file == script:
            changed = Path(tempfile.mkdtemp(), script)
            changed.write_text(text)
            continue
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        for function, code in functions_of(compile(text, file, "exec"), module):
            function.__code__ = code
    sys.argv = [script, *flags]
    runpy.run_path(str(changed if script in {edit.file for edit in edits} else ROOT / script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], [Edit(*edit) for edit in json.loads(Path(sys.argv[2]).read_text())], sys.argv[3:])
