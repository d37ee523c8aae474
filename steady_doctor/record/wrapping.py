"""Functions of torch and of Python's library that are wrapped while a script runs."""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

COMPILED = "the step of the optimizer is compiled, where nothing can be recorded"
_in_compiler: list[tuple[Any, str]] = []  # (owner, name) of those that torch's compiler would go through


def wrap(hooks: ExitStack, owner: Any, name: str, around: Callable) -> None:
    """Has `around(original, *arguments, **options)` called in the place of this function, until `hooks` is closed."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    setattr(owner, name, wrapped)
    _in_compiler.append((owner, name))
    hooks.callback(setattr, owner, name, original)
    hooks.callback(_forget, owner, name)
    if "torch._dynamo" in sys.modules:
        _leave_out()


def compile_(original: Callable, *arguments: Any, **options: Any) -> Any:
    """Stands around torch.compile, which imports the compiler: that takes long, and is not needed before."""
    result = original(*arguments, **options)
    _leave_out()
    return result


@contextmanager
def eagerly() -> Iterator[None]:
    """Nothing runs compiled within: torch's compiler gives up for good on code in which it meets a tape. What the script asks
    of the compiler within holds afterwards. Raises RuntimeError in compiled code, where no recording may begin or end: after
    it torch's state is what it was before."""
    if is_in_compiled_code():
        raise RuntimeError(COMPILED)
    stance = torch.compiler.set_stance("force_eager")
    decorators = sys.modules["torch._dynamo.decorators"]

    def keep(asked: Any) -> Any:
        before, stance.prev = stance.prev, asked
        return before

    original, decorators._set_stance = decorators._set_stance, keep  # type: ignore[attr-defined]
    try:
        yield
    finally:
        decorators._set_stance = original  # type: ignore[attr-defined]
        stance.__exit__(None, None, None)


def is_in_compiled_code() -> bool:
    """Whether such code called this, be it compiled or not at the time."""
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
