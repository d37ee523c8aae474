"""Options from a file, and as one: YAML with a flag per line, or the options.json of an earlier run."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from utils.core.errors import UserError
from utils.options.paths import located
from utils.options.values import Values

HIDDEN = "<hidden>"  # in place of a secret
REMOVED = {  # flag -> what instead
    "profile": "use a profiler that starts the script: py-spy record, or nsys profile on a GPU",
    "peak_tflops": "multiply perf/images_per_second by the FLOPs per image that --dry_run prints",
    **dict.fromkeys(("cache", "prune_cache"), "use du and rm -r in the folder of the packed images: docs/data.md"),
}


def read_config(
    path: Path, values: Mapping[str, Values], not_from_records: Collection[str], paths: Collection[str]
) -> dict[str, Any]:
    """Returns the values that a file gives to flags, by their names.

    Args:
        values: those of each flag, by its name.
        not_from_records: flags that belong to one start of a run, and are left out where the file is an options.json.
        paths: flags whose values may be paths, which in an options.json count from where that run was started.

    Raises UserError where the file cannot be read, and KeyError, with the name, for a flag that does not exist.
    """
    content = _content(path)
    if isinstance(content.get("options"), dict):  # an options.json
        content = located(content, path.parent, paths)
        content = {name: value for name, value in content.items() if name not in not_from_records and value != HIDDEN}
        if content.get("global_batch_size") is not None:
            content.pop("gradient_accumulation_steps", None)  # it followed, and follows again on other processes
    found = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in REMOVED and value in (None, ""):  # of an earlier run, which did not use it
            continue
        if name not in values:
            raise KeyError(key)
        try:
            found[name] = values[name].read_file(value)
        except ValueError as error:
            raise UserError(f"--config {path}: {name} {error}\nchange this value in the file") from None
    return found


def _content(path: Path) -> dict[str, Any]:
    """The mapping in a file, all scalars as text but JSON's null, true and false."""
    import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

    try:
        text = path.read_text()
        if path.suffix == ".json":
            content = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
        else:
            content = yaml.load(text, yaml.BaseLoader)  # text as on a command line: `no` is no truth value, 1e-4 no word
    except OSError as error:
        raise UserError(f"cannot read --config {path}: {error.strerror}\ncheck the path") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"--config {path} is neither YAML nor JSON: {' '.join(str(error).split())}\n"
            "write one flag per line, for example `resolution: 32`"
        ) from None
    if content is None or content == "":
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path} is not a list of flags\nwrite one flag per line, for example `resolution: 32`")
    return content


def config_text(values: Mapping[str, Any]) -> str:
    """Returns YAML of these values that `read_config` reads."""
    import yaml

    plain = json.loads(json.dumps(dict(values), default=str))  # tuples as lists, paths as text
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000)
