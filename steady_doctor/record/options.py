"""What the user asked for: options as argparse has them, numbers on the command line, and what Accelerate was told."""

import argparse
import gc
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


def told_micro_steps(optimizer: Any) -> int | None:
    """Of an update, as Accelerate was told, where it has this optimizer."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    told = getattr(state, "_shared_state", {}).get("plugin_kwargs", {}).get("num_steps")
    kind = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    if kind is None or told in (None, 1):
        return None
    has = any(type(thing) is kind and thing.optimizer is optimizer for thing in gc.get_objects())
    return told if has else None
