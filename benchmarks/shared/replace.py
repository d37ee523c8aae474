"""Puts something else in the place of a function, wherever it was imported to: a patch of one name would miss the others."""

import functools
import importlib
import sys

import pytest

fired: dict[str, int] = {}  # name -> how often what was put in its place has been called


def replace_everywhere(name: str, new, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """`name` is "package.module.function"; `monkeypatch` undoes it. `fired` counts the calls. Raises AttributeError where there
    is no such function."""
    module_name, attribute = name.rsplit(".", 1)
    old = getattr(importlib.import_module(module_name), attribute)
    fired[name] = 0

    @functools.wraps(new)
    def counted(*arguments, **options):
        fired[name] += 1
        return new(*arguments, **options)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(attribute) is old:
            (monkeypatch.setattr if monkeypatch else setattr)(module, attribute, counted)


def check_fired(main):
    """`main`, which raises RuntimeError in the end where something that was put in place has never been called."""

    def checked(*arguments) -> int | None:
        status = main(*arguments)
        idle = [name for name, calls in fired.items() if calls == 0]
        if idle:
            raise RuntimeError(f"a fault that did not fire: {', '.join(idle)}")
        return status

    return checked
