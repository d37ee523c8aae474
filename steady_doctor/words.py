"""The sentences of each finding, from findings.toml."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def table() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "findings.toml").read_text())


def stage(code: str) -> str:
    return table().get(code, {}).get("stage", code.split("-")[0])


def severity(code: str) -> str:
    return table().get(code, {}).get("severity", "warning")
