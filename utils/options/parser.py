"""The command line of a script, made of the fields of its options.

A field made by `flag` is a flag: its name, type, default, help, range, and whether a resumed run may have another value. A
group of flags is a dataclass, which `--help` calls by its docstring. The options of a script inherit all groups, so names are
flat: `options.resolution`, `--resolution`. A preset's values replace defaults, and what is given replaces both.
"""

import argparse
import difflib
import json
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from utils.core.errors import UserError

T = TypeVar("T", bound="Options")
HIDDEN = "<hidden>"  # in place of a secret


def flag(default: Any = None, help: str = "", **about) -> Any:
    """Makes a field that is a flag.

    Args:
        default: `MISSING` where the flag must be given.
        about: at_least, above, below: the range of its values; free=True: a resumed run may have another value; secret=True: it
            is never recorded; positional=True: it has no dashes; metavar: how `--help` calls its value.
    """
    about["help"] = help
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


def changed(group: "type[Options]", name: str, default: Any, help: str | None = None) -> Any:
    """Repeats the flag `name` of `group` with another default in the options of one script."""
    about = group.__dataclass_fields__[name].metadata
    return field(default=default, metadata=about if help is None else {**about, "help": help})


@dataclass(kw_only=True)
class Options:
    """What all options have in common; beside the values, not among `vars`, the names of the flags that were `given`."""

    __slots__ = ("given",)

    presets: ClassVar[dict[str, dict]] = {}  # name -> values, of --model_preset
    about_presets: ClassVar[str] = ""  # for `--help`
    excludes: ClassVar[dict[str, tuple[str, ...]]] = {}  # a flag that is given -> values of a preset that then do not count

    def __post_init__(self):
        self.given: frozenset[str] = frozenset()

    @classmethod
    def preset_name(cls, given: dict[str, Any]) -> str | None:
        """Returns the preset that the flags that were given name or imply."""
        return given.get("model_preset")

    def check(self) -> None:
        """Raises UserError where flags contradict each other."""

    def shaping(self, **computed) -> dict[str, Any]:
        """The values that shape the result, which a resumed run must not change, with `computed` facts; JSON types only."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if not each.metadata.get("free")}
        return json.loads(json.dumps(values | computed))

    def secrets(self) -> list[str]:
        """Returns the values that no record may hold."""
        return [value for each in fields(self) if each.metadata.get("secret") and (value := getattr(self, each.name))]

    def recorded(self) -> dict[str, Any]:
        """Returns all values by their names, sorted, secrets hidden."""
        secret = {each.name for each in fields(self) if each.metadata.get("secret")}
        return {name: HIDDEN if name in secret and value else value for name, value in sorted(vars(self).items())}

    @classmethod
    def from_record(cls: type[T], recorded: dict[str, Any]) -> T:
        """These options as a run recorded them, which may have more. Raises KeyError where it lacks one."""
        return cls(**{each.name: recorded[each.name] for each in fields(cls)})


def parse_options(cls: type[T], description: str, argv: list[str] | None = None) -> T:
    """Returns the options of a command line (None: this process's).

    Raises UserError for an unknown flag, an unknown preset, and values that no run can use; argparse ends the process with
    status 2 where a value is not of its flag's type.
    """
    parser = make_parser(cls, description)
    namespace, unknown = parser.parse_known_args(argv)
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    for word in unknown:
        if word.startswith("--"):
            near = difflib.get_close_matches(word.split("=")[0], parser._option_string_actions, n=1)
            raise UserError(f"unknown flag {word}" + (f"; did you mean {near[0]}?" if near else " (--help lists all)"))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    missing = [f"--{each.name}" for each in fields(cls) if is_required(each) and each.name not in given]
    if missing:
        parser.error(f"needed: {', '.join(missing)}")
    preset = cls.preset_name(given)
    values = {}
    if preset is not None:
        if preset not in cls.presets:
            raise UserError(f"unknown --model_preset {preset!r}; choose from {', '.join(cls.presets)}")
        values = cls.presets[preset] | {"model_preset": preset}
        for name in given.keys() & cls.excludes.keys():
            values = {other: value for other, value in values.items() if other not in cls.excludes[name]}
    options = cls(**values | given)
    options.given = frozenset(given)
    check_ranges(options)
    options.check()
    return options


def make_parser(cls: type[Options], description: str) -> argparse.ArgumentParser:
    """Returns an argparse parser whose result holds nothing but what was given."""
    presets = preset_table(cls) if cls.presets else None
    parser = argparse.ArgumentParser(
        description=description,
        epilog=presets,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,  # an abbreviation may mean another flag in the next release
    )
    declared = {each.name: each for each in fields(cls)}
    owners: dict[str, type] = {}  # the group that a flag was first declared in: another default does not move it
    for base in reversed(cls.__mro__):
        for name in declared.keys() & vars(base).get("__annotations__", {}).keys():
            owners.setdefault(name, base)
    groups: dict[str | None, Any] = {}
    for base in cls.__mro__:
        for name in (name for name in vars(base).get("__annotations__", {}) if owners.get(name) is base):
            group = groups.get(base.__doc__) or groups.setdefault(base.__doc__, parser.add_argument_group(base.__doc__))
            add_flag(group, declared[name], get_type_hints(base)[name])
    return parser


def add_flag(group: Any, declared: Field, kind: Any) -> None:
    """Adds the flag of a field to a group of argparse. Its type may be bool, int, float, str, Path, a Literal of one type, a
    list of these, and `int | Literal["auto"]`."""
    about, words = declared.metadata, {"help": declared.metadata["help"] or None}
    kinds = [part for part in get_args(kind) if part is not NoneType] if get_origin(kind) in (Union, UnionType) else [kind]
    kind = kinds[0]
    if kind is bool:
        words["action"] = "store_true" if declared.default is False else argparse.BooleanOptionalAction
    else:
        if get_origin(kind) is list:
            kind, words["nargs"] = get_args(kind)[0], "+"
        if get_origin(kind) is Literal:
            words["choices"], kind = get_args(kind), type(get_args(kind)[0])
        words["type"] = kind if len(kinds) == 1 else number_or(get_args(kinds[1])[0])
        if "metavar" in about:
            words["metavar"] = about["metavar"]
    if not about.get("positional"):
        group.add_argument(f"--{declared.name}", **words)
    elif is_required(declared):
        group.add_argument(declared.name, **words)
    else:
        group.add_argument(declared.name, **words, nargs="?", default=None)


def is_required(declared: Field) -> bool:
    return declared.default is MISSING and declared.default_factory is MISSING


def number_or(word: str) -> Callable[[str], int | str]:
    def number(text: str) -> int | str:
        return text if text == word else int(text)

    return number


def check_ranges(options: Options) -> None:
    """Raises UserError that names the first flag whose value no run can use."""
    for each in fields(options):
        value, about = getattr(options, each.name), each.metadata
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        at_least, above, below = about.get("at_least"), about.get("above"), about.get("below")
        inside = (
            (at_least is None or value >= at_least) and (above is None or value > above) and (below is None or value < below)
        )
        if not inside:
            parts = ("at least", at_least), ("above", above), ("below", below)
            wanted = " and ".join(f"{word} {limit}" for word, limit in parts if limit is not None)
            raise UserError(f"--{each.name} must be {wanted}, got {value}")


def preset_table(cls: type[Options]) -> str:
    """Returns the presets as text for `--help`: what is to be said about them, and each with the flags that it changes."""
    lines = ["model presets (a network and these defaults; your own flags win):", *cls.about_presets.splitlines()]
    for name, values in cls.presets.items():
        words = " ".join(f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in values.items())
        lines.append(f"  {name}: {words}")
    return "\n".join(lines)
