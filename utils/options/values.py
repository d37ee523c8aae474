"""The values of one flag: how text becomes one, and what a message calls those that are allowed."""

import argparse
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class Values:
    """Which values a flag takes; one that `is_list` takes several."""

    type: type  # bool, int, float, str or Path
    choices: tuple = ()
    word: str | None = None  # that may stand for a number
    is_list: bool = False
    optional: bool = False  # None is one
    limits: tuple[tuple[str, float], ...] = ()  # such as ("at least", 1)
    reads: Callable[[str], Any] | None = None  # in place of the type's own; raises ValueError
    words: str | None = None  # for one value

    @classmethod
    def of(cls, hint: Any, about: Mapping[str, Any]) -> "Values":
        """Of a field by its type, which may be bool, int, float, str, Path, a Literal of one type, a list of these, and
        `int | Literal["auto"]`, or any where it has `reads`, and by its range (see `parser.flag`)."""
        parts = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
        kinds = [part for part in parts if part is not NoneType]
        kind, choices, is_list = kinds[0], (), get_origin(kinds[0]) is list
        if is_list:
            (kind,) = get_args(kind)
        if get_origin(kind) is Literal:
            choices, kind = get_args(kind), type(get_args(kind)[0])
        if "reads" in about:
            return cls(str, optional=len(kinds) < len(parts), reads=about["reads"], words=about["words"])
        word = get_args(kinds[1])[0] if len(kinds) > 1 else None
        limits = tuple((words, about[key]) for key, words in LIMITS.items() if about.get(key) is not None)
        return cls(kind, choices, word, is_list, len(kinds) < len(parts), limits)

    def allowed(self) -> str:
        """Returns words for one value: "a number above 0", "one of no, fp16, bf16"."""
        if self.words:
            return self.words
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}" if len(self.choices) > 1 else str(self.choices[0])
        words = {bool: "true or false", int: "a whole number", float: "a number"}.get(self.type, "a text")
        limits = " and ".join(f"{word} {limit}" for word, limit in self.limits)
        words += " " * bool(limits) + limits.replace("at least", "of at least")
        return words + (f", or {self.word}" if self.word else "")

    def read(self, text: str) -> Any:
        """Returns the value that `text` is. Raises ValueError where it is none, which says what is allowed."""
        if text == self.word:
            return text
        if self.type in (str, Path) and re.match(r"(~|\$\w+|\$\{\w+\})/", text):  # of a file, or behind `=`: no shell saw it
            text = os.path.expandvars(os.path.expanduser(text))
            if text.startswith("$"):
                raise ValueError(f"begins with a variable that is not set: {text}")
        try:
            value = TRUTH[text.lower()] if self.type is bool else (self.reads or self.type)(text)
        except (ValueError, KeyError):
            value = None
        if value is None or not text.strip() or not self._allows(value):
            raise ValueError(f"must be {self.allowed()}; got {text or 'nothing'}")
        return value

    def __call__(self, text: str) -> Any:
        """Reads the text as argparse asks a `type` to."""
        try:
            return self.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.type is float and not math.isfinite(value):
            return False
        return all(INSIDE[word](value, limit) for word, limit in self.limits)

    def read_file(self, content: Any) -> Any:
        """Returns the value or list of values of what a YAML or JSON file holds, scalars as text. Raises ValueError."""
        if content is None or content in ("", "null", "~"):
            if not self.optional:
                raise ValueError(f"must be {self.allowed()}; got null")
            return None
        if isinstance(content, dict) or (isinstance(content, list) and not self.is_list):
            raise ValueError(f"must be {self.allowed()}; got a {'mapping' if isinstance(content, dict) else 'list'}")
        if not self.is_list:
            return self.read(str(content))
        return [self.read(str(part)) for part in (content if isinstance(content, list) else [content])]


LIMITS = {"at_least": "at least", "above": "above", "below": "below"}
INSIDE = {"at least": operator.ge, "above": operator.gt, "below": operator.lt}
TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
