"""Functions of torch and of Python's library that are wrapped while a script runs."""

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

_in_compiler: list[tuple[Any, str]] = []  # (owner, name) of those that torch's compiler would go through


def wrap(hooks: ExitStack, owner: Any, name: str, around: Callable) -> None:
    """Has `around(original, *arguments, **options)` called in the place of this function, until `hooks` is closed."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    setattr(owner, name, wrapped)
    hooks.callback(setattr, owner, name, original)
    _note(hooks, owner, name)


def hook(hooks: ExitStack, register: Callable, function: Callable) -> None:
    """Has torch call `function`, by one of its ways to `register` a hook, until `hooks` is closed; not in compiled code."""
    called = SimpleNamespace(function=lambda *arguments: None if _is_in_compiled_code() else function(*arguments))
    hooks.callback(register(lambda *arguments: None if torch.compiler.is_compiling() else called.function(*arguments)).remove)
    _note(hooks, called, "function")


def _note(hooks: ExitStack, owner: Any, name: str) -> None:
    _in_compiler.append((owner, name))
    hooks.callback(_forget, owner, name)
    if "torch._dynamo" in sys.modules:
        _leave_out()


def compile_(original: Callable, *arguments: Any, **options: Any) -> Any:
    """Stands around torch.compile, which imports the compiler: that takes long, and is not needed before."""
    result = original(*arguments, **options)
    _leave_out()
    return result


def eagerly() -> AbstractContextManager:
    """Nothing runs compiled within: torch's compiler gives up for good on code in which it meets a tape. Raises RuntimeError
    in what compiled code calls: when that ends, torch's state is made what it was, with no tape or with one that is over."""
    if _is_in_compiled_code():
        raise RuntimeError("the whole step is compiled, and no recording can begin in compiled code")
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _is_in_compiled_code() -> bool:
    """Whether such code called this."""
    frame = sys._getframe() if "torch._dynamo" in sys.modules else None
    while frame is not None:
        if frame.f_code.co_qualname.startswith("_TorchDynamoContext."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _forget(owner: Any, name: str) -> None:
    if (owner, name) in _in_compiler:
        _in_compiler.remove((owner, name))


def _leave_out() -> None:
    """Tells torch's compiler to call the wrapped functions, and not to go through them."""
    while _in_compiler:
        owner, name = _in_compiler.pop()
        setattr(owner, name, torch._dynamo.disable(vars(owner)[name]))


def without_warning(hooks: ExitStack, message: str) -> None:
    """Leaves out warnings about what the doctor does, not the script. `message`: a regular expression of its beginning."""
    warnings.filterwarnings("ignore", message)
    entry = warnings.filters[0]
    hooks.callback(lambda: warnings.filters.remove(entry) if entry in warnings.filters else None)  # type: ignore[attr-defined]
