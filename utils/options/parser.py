"""The command line of a script, made of the fields of its options.

A field made by `flag` is a flag: its name, type, default, help, range, and whether a resumed run may have another value. A
group of flags is a dataclass, which `--help all` calls by its docstring. The options of a script inherit all groups, so names
are flat: `options.resolution`, `--resolution`. A preset's values replace defaults, those of --config both, and what the
command line gives all of them.
"""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform, get_type_hints

from utils.core.errors import UserError
from utils.core.versions import about_version
from utils.options.config_file import HIDDEN, REMOVED, config_text, read_config
from utils.options.values import Values

T = TypeVar("T", bound="Options")
_LAUNCHERS = {"num_processes", "config_file", "num_machines", "machine_rank", "main_process_port", "gpu_ids", "multi_gpu"}
_ELSEWHERE = {"lr": "learning_rate", "image_size": "resolution", "report_to": "logger", "steps": "max_train_steps"}


def flag(default: Any = None, help: str = "", **about) -> Any:
    """Makes a field that is a flag.

    Args:
        default: `MISSING` where the flag must be given.
        about: at_least, above, below: the range of its values; reads: what makes a value of a text, and words: what to call
            such values; free=True: a resumed run may have another value; secret=True: it
            is never recorded; once=True: it is of one start of a run, and no other start takes it from options.json;
            positional=True: it has no dashes; path=True: its value may be a path; metavar: how `--help all` calls its value.
    """
    about["help"] = help
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


def changed(group: "type[Options]", name: str, default: Any, help: str | None = None) -> Any:
    """Repeats the flag `name` of `group` with another default in the options of one script."""
    about = group.__dataclass_fields__[name].metadata
    return field(default=default, metadata=about if help is None else {**about, "help": help})


@dataclass_transform(kw_only_default=True)
@dataclass(kw_only=True)
class Options:
    """What all options have in common, which are dataclasses; beside the values, not among `vars`, the names of the flags that
    were `given`."""

    __slots__ = ("given",)

    def __init_subclass__(cls):
        dataclass(kw_only=True)(cls)

    presets: ClassVar[dict[str, dict]] = {}  # name -> values, of --model_preset
    about_presets: ClassVar[str] = ""  # for `--help all`
    basics: ClassVar[tuple[str, ...]] = ()  # the flags that `--help` shows; empty: all
    excludes: ClassVar[dict[str, tuple[str, ...]]] = {}  # a flag that is given -> values of a preset that then do not count

    needs: ClassVar[dict[str, tuple[str, ...]]] = {}  # flags -> the flag without which (of these values) they have no effect

    def __post_init__(self):
        self.given: frozenset[str] = frozenset()

    @classmethod
    def preset_name(cls, given: dict[str, Any]) -> str | None:
        """Returns the preset that the flags that were given name or imply."""
        return given.get("model_preset")

    def check(self) -> None:
        """Raises UserError where flags contradict each other."""

    def without_effect(self) -> list[str]:
        """Returns what to say of flags that were given and have no effect."""
        return [
            f"--{name} has no effect without --{needed}{' ' * bool(values)}{' or '.join(values)}"
            for names, (needed, *values) in self.needs.items()
            for name in sorted(self.given.intersection(names.split()))
            if not (getattr(self, needed) in values if values else getattr(self, needed))
        ]

    @classmethod
    def marked(cls, *marks: str) -> list[str]:
        """Returns the names of the flags that have any of these, such as `free` or `path`; see `flag`."""
        return [each.name for each in fields(cls) if any(each.metadata.get(mark) for mark in marks)]

    def shaping(self, **computed) -> dict[str, Any]:
        """The values that shape the result, which a resumed run must not change, with `computed` facts; JSON types only."""
        values = {name: value for name, value in vars(self).items() if name not in self.marked("free")}
        return json.loads(json.dumps(values | computed))

    def lasting(self) -> dict[str, Any]:
        """Returns what a record has of the values that are neither secret nor of one start of a run; JSON types only."""
        left_out = self.marked("secret", "once")
        return {name: value for name, value in json.loads(json.dumps(self.recorded())).items() if name not in left_out}

    def recorded(self) -> dict[str, Any]:
        """Returns all values by their names, sorted, secrets hidden."""
        secret = self.marked("secret")
        return {name: HIDDEN if name in secret and value else value for name, value in sorted(vars(self).items())}

    @classmethod
    def from_record(cls: type[T], recorded: dict[str, Any]) -> T:
        """These options as a run recorded them, which may have more. Raises KeyError where it lacks one."""
        return cls(**{each.name: recorded[each.name] for each in fields(cls)})


def parse_options(cls: type[T], description: str, argv: list[str] | None = None) -> T:
    """Returns the options of a command line (None: this process's), over those of its --config. Raises UserError for what no
    run can use. Ends the process with status 0 after --help, --version and --print_config."""
    parser, values = make_parser(cls, description), values_of(cls)
    words = [spelled(word, parser) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        namespace, unknown = parser.parse_known_args(words)
    except UserError:
        for word in words:  # the value of a mistyped flag looks like a wrong word
            if word.startswith("--") and word.split("=")[0] not in parser._option_string_actions:
                refuse(word, words, parser)
        raise
    if unknown:
        refuse(unknown[0], words, parser)
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    path, prints = given.pop("config", None), given.pop("print_config", False)
    filed = {}
    if path is not None:
        try:
            filed = read_config(path, values, cls.marked("once"), cls.marked("path"))
        except KeyError as error:
            raise UserError("\n".join(about_unknown(error.args[0], values, parser, f"--config {path}: "))) from None
    options = resolve(cls, filed, given)
    if prints:
        if os.environ.get("RANK", "0") == "0":
            secret = cls.marked("secret")
            print(config_text({name: value for name, value in vars(options).items() if name not in secret}), end="", flush=True)
        raise SystemExit(0)
    return options


def resolve(cls: type[T], filed: dict[str, Any], given: dict[str, Any]) -> T:
    """Returns the options of what a file gives and what a command line gives, which wins. Raises UserError."""
    both = merged(cls.excludes, filed, given)
    required = [each for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING]
    missing = ["--" * (not each.metadata.get("positional")) + each.name for each in required if each.name not in both]
    if missing:
        raise UserError(f"missing: {', '.join(missing)}\n--help all explains all flags")
    preset = both["model_preset"] if "model_preset" in both else cls.preset_name(both)
    usual: dict[str, Any] = {}
    if preset is not None:
        if preset not in cls.presets:
            raise UserError(f"unknown --model_preset {preset!r}\nchoose from {', '.join(cls.presets)}")
        usual = cls.presets[preset] | {"model_preset": preset}
    options = cls(**merged(cls.excludes, usual, filed, given))
    plain = {each.name: each.default for each in fields(cls)} | usual
    # What a file only repeats is not given: so the options that --print_config printed mean what they meant.
    options.given = frozenset(given) | {name for name, value in filed.items() if name in both and value != plain[name]}
    options.check()
    return options


def merged(excludes: dict[str, tuple[str, ...]], *layers: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of all layers. A later one wins, and takes away from those before it what its flags exclude."""
    values: dict[str, Any] = {}
    for layer in layers:
        gone = {other for name, value in layer.items() if value not in (None, False) for other in excludes.get(name, ())}
        values = {name: value for name, value in values.items() if name not in gone} | layer
    return values


def spelled(word: str, parser: argparse.ArgumentParser) -> str:
    """Returns a word of a command line, with the flag in it as it is declared: --train-batch-size=8 for --train_batch_size."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    flags = (flag for flag in parser._option_string_actions if flag.replace("-", "_") == name.replace("-", "_"))
    return next(flags, name) + equals + value


def refuse(word: str, words: list[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Raises UserError about the first word that the parser did not understand."""
    if word.startswith("-"):
        flags = {flag: None for flag in parser._option_string_actions if flag.startswith("--")}
        raise UserError("\n".join(about_unknown(word.split("=")[0], flags, parser)))
    before = words[max(words.index(word) - 1, 0)]
    action = parser._option_string_actions.get(before)
    why = f" after {before}, which takes no value" if action and action.nargs == 0 else ": flags begin with --"
    raise UserError(f"unexpected word {word}{why}\n{parser.prog} --help all lists all flags")


def about_unknown(name: str, known: Iterable[str], parser: argparse.ArgumentParser, where: str = "") -> list[str]:
    """Returns what to say of a flag that does not exist: its name, the nearest ones, and where all of them are."""
    bare = name.lstrip("-").replace("-", "_")
    if bare in REMOVED:
        return [f"{where}{name} is no longer a flag", REMOVED[bare]]
    if bare in _LAUNCHERS and not where:
        return [f"{name} is a flag of accelerate launch", f"write it before {parser.prog}: accelerate launch {name} ..."]
    names = {flag.lstrip("-").replace("-", "_"): flag for flag in known}
    near = [_ELSEWHERE[bare]] if _ELSEWHERE.get(bare) in names else difflib.get_close_matches(bare, names, n=3)
    near = near or [flag for flag in names if bare in flag.split("_")][:3]
    lines = [f"{where}unknown flag {name}", f"{parser.prog} --help all lists all flags"]
    return [lines[0], f"nearest: {', '.join(names[flag] for flag in near)}", lines[1]] if near else lines


class Parser(argparse.ArgumentParser):
    """Raises UserError, in one line that begins with the flag, where argparse prints its usage and ends the process."""

    def error(self, message: str) -> NoReturn:
        if found := re.fullmatch(r"argument ([\w-]+)\S*: (.*)", message, re.DOTALL):
            name, problem = found.groups()
            if problem.startswith("expected"):
                takes = self._option_string_actions[name].type
                problem = f"needs a value: {takes.allowed() if isinstance(takes, Values) else 'a file'}"
            problem = re.sub("^ignored explicit argument '?(.*?)'?$", r"takes no value, got \1", problem)
            message = f"{name} {problem}"
        of_flag = found and name.startswith("-")
        raise UserError(message if of_flag else f"{message}\n{self.prog} --help all explains all flags")


class ShowHelp(argparse.Action):
    """The flags that a newcomer needs, or all of them."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *_: Any) -> None:
        if isinstance(values, str) and values != "all":
            parser.error(f"--help takes no value, or all; got {values}")
        if values and values != "all":
            flags = [action for action in parser._actions if action.option_strings]
            for action in flags:
                if action.dest not in (*values, "help", "config"):
                    action.help = argparse.SUPPRESS
            presets = " and the presets" if parser.epilog else ""
            parser.epilog = f"{parser.prog} --help all explains all {len(flags)} flags{presets}"
        parser.print_help()
        parser.exit()


class ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(about_version())
        parser.exit()


def values_of(cls: type[Options]) -> dict[str, Values]:
    """Returns which values each flag takes, by its name."""
    hints = {name: hint for base in reversed(cls.__mro__) for name, hint in get_type_hints(base).items() if hint is not Any}
    return {each.name: Values.of(hints[each.name], each.metadata) for each in fields(cls)}


def make_parser(cls: type[Options], description: str) -> argparse.ArgumentParser:
    """Returns an argparse parser whose result holds nothing but what was given."""
    presets = preset_table(cls) if cls.presets else None
    parser = Parser(
        usage="%(prog)s [--flag value ...]",
        description=description,
        epilog=presets,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,  # an abbreviation may mean another flag in the next release
        add_help=False,
    )
    helps = "explain the usual flags; --help all: every flag" if cls.basics else "explain all flags"
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # type: ignore[assignment]  # -1e-4 is a value, too
    parser.add_argument("-h", "--help", action=ShowHelp, nargs="?", metavar="all", const=cls.basics, help=helps)
    about = "print the versions of this program and its libraries"
    parser.add_argument("--version", action=ShowVersion, nargs=0, help=about)
    parser.add_argument(
        "--config",
        type=lambda text: Path(text).expanduser(),
        metavar="FILE",
        help="read flags from a YAML file, or from the options.json of an earlier run; flags of the command line override "
        "the file, and the file overrides a preset",
    )
    parser.add_argument("--print_config", action="store_true", help="print all options as YAML, for --config, and stop")
    declared, values = {each.name: each for each in fields(cls)}, values_of(cls)
    owners: dict[str, type] = {}  # the group that a flag was first declared in: another default does not move it
    for base in reversed(cls.__mro__):
        for name in declared.keys() & vars(base).get("__annotations__", {}).keys():
            owners.setdefault(name, base)
    groups: dict[str | None, Any] = {}
    for base in cls.__mro__:
        for name in (name for name in vars(base).get("__annotations__", {}) if owners.get(name) is base):
            group = groups.get(base.__doc__) or groups.setdefault(base.__doc__, parser.add_argument_group(base.__doc__))
            turned_on = any(preset.get(name) for preset in cls.presets.values())  # by a preset, which a user may turn off again
            add_flag(group, declared[name], values[name], negated=declared[name].default is not False or turned_on)
    return parser


def add_flag(group: Any, declared: Field, values: Values, negated: bool) -> None:
    """Adds the flag of a field to a group of argparse."""
    about, words = declared.metadata, {"help": declared.metadata["help"] or None}
    if values.type is bool:
        words["action"] = argparse.BooleanOptionalAction if negated else "store_true"
    else:
        words |= {"type": values, "choices": values.choices or None, "nargs": "+" if values.is_list else None}
        words |= {"metavar": about["metavar"]} if "metavar" in about else {}
    if not about.get("positional"):
        group.add_argument(f"--{declared.name}", **words)
    else:  # not required by argparse: --config may give it
        group.add_argument(declared.name, **words | {"nargs": "?", "default": None})


def words_of(values: dict[str, Any]) -> list[str]:
    """Returns the words of a command line that gives these values; None and empty lists are not given."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list) and value:
            words += [f"--{name}", *map(str, value)]
        elif value is not None and value != []:
            words += [f"--{name}={value}"] if str(value).startswith("-") else [f"--{name}", str(value)]
    return words


def preset_table(cls: type[Options]) -> str:
    """Returns the presets as text for `--help all`: what is to be said about them, and each with the flags that it changes."""
    lines = ["model presets (a network and these defaults; your own flags win):", *cls.about_presets.splitlines()]
    for name, values in cls.presets.items():
        words = " ".join(f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in values.items())
        lines.append(f"  {name}: {words}")
    return "\n".join(lines)
