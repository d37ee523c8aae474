"""What the user asked the script for: the options that argparse read, and numbers on the command line."""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

NAMESPACES = "__main__"


class Options:
    """`install` before the script begins. Nothing is asked for that a script sets by itself."""

    def __init__(self) -> None:
        self._read: list[argparse.Namespace] = []

    def install(self, hooks: ExitStack, wrap: Callable) -> None:
        wrap(hooks, argparse.ArgumentParser, "parse_known_args", self._note)

    def _note(self, original: Callable, parser: Any, *arguments: Any, **options: Any) -> Any:
        result = original(parser, *arguments, **options)
        self._read.append(result[0])
        return result

    def values(self) -> dict[str, Any]:
        """Names and values, as they are now."""
        kept = [value for value in vars(sys.modules[NAMESPACES]).values() if isinstance(value, argparse.Namespace)]
        return {name: value for space in (*self._read, *kept) for name, value in vars(space).items()}

    def numbers(self) -> set[float]:
        """All numbers among them, and on the command line."""
        found = {float(value) for value in self.values().values() if isinstance(value, (int, float))}
        for word in (part for argument in sys.argv[1:] for part in argument.split("=")):
            try:
                found.add(float(word))
            except ValueError:
                continue
        return found
