"""What the user asked the script for: options as argparse has them, and numbers on the command line."""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


class Options:
    """`install` before the script begins. Nothing is asked for that a script sets by itself."""

    def __init__(self) -> None:
        self._made: list[argparse.Namespace] = []

    def install(self, hooks: ExitStack, wrap: Callable) -> None:
        wrap(hooks, argparse.Namespace, "__init__", self._note)

    def _note(self, original: Callable, namespace: argparse.Namespace, *arguments: Any, **options: Any) -> None:
        original(namespace, *arguments, **options)
        self._made.append(namespace)

    def values(self) -> dict[str, Any]:
        """Names and values, as they are now."""
        return {name: value for namespace in self._made for name, value in vars(namespace).items()}

    def words(self) -> str:
        """All of them and the command line, in small letters and digits alone."""
        said = " ".join([*sys.argv[1:], *(f"{name} {value}" for name, value in self.values().items())])
        return "".join(letter for letter in said.lower() if letter.isalnum() or letter == " ")

    def numbers(self) -> set[float]:
        """All numbers among them, and on the command line."""
        found = {float(value) for value in self.values().values() if isinstance(value, (int, float))}
        for word in (part for argument in sys.argv[1:] for part in argument.split("=")):
            try:
                found.add(float(word))
            except ValueError:
                continue
        return found
