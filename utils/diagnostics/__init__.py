"""`from utils.diagnostics import watch` watches any training loop; what it needs is imported when it is asked for."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "watch":
        from utils.diagnostics.watching.told import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
