"""What went wrong on the Hugging Face Hub, in the words of these scripts. Imports no torch."""

import contextlib
import os
import re
from collections.abc import Iterator

from utils.core.errors import UserError, in_full


def log_in() -> str:
    """Returns how to get the Hub to take a token, or another one than the token that is used now."""
    from huggingface_hub import get_token

    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):  # which go before the token of `hf auth login`
        if os.environ.get(variable):
            return f"set another {variable}"
    return "log in again with `hf auth login --force`" if get_token() else "log in with `hf auth login`, or set HF_TOKEN"


@contextlib.contextmanager
def loading(what: str, name: str, kind: str) -> Iterator[None]:
    """Turns what fails inside the block, of which each library raises its own kind, into a UserError; see `told`."""
    try:
        yield
    except Exception as error:
        raise UserError(f"cannot load {what}: {reason_of(error, name, kind)}") from error


def reason_of(error: BaseException, name: str, kind: str) -> str:
    """What to say of `error`, which came while `name`, a `kind` ("dataset" or "model"), was loaded: what the library said, and
    what to do."""
    from huggingface_hub import get_token

    if is_only_a_path(name) and not os.path.exists(name):
        return no_such_path(name)
    if os.path.exists(name):  # a library may have taken it for a name on the Hub
        return f"it is here, but cannot be loaded as a {kind} ({in_full(error)})\ncheck its files, and the flags about it"
    errors = list(_chain(error))
    if any(type(found).__name__ == "GatedRepoError" or f"is a gated {kind}" in str(found) for found in errors):
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
        return f"it is gated\nask for access at {page}, {'or' if get_token() else 'then'} {log_in()}"
    if get_token() and any(getattr(getattr(found, "response", None), "status_code", 0) == 401 for found in errors):
        return f"the Hub does not accept the token\n{log_in()}"
    return f"{in_full(error)}\ncheck the name or path, and the network, or {log_in()}"


def is_only_a_path(name: str) -> bool:
    """Returns whether this cannot be a name on the Hub, which is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def no_such_path(name: str, flag: str = "the name") -> str:
    """Returns what to say of a `name` that is only a path, where nothing is; of the Hub's pages, what to give to `flag`."""
    page = re.match(r"https?://(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/?#]+(?:/[^/?#]+)?)", name)
    if page:
        return f"this is the address of a page\nuse {flag} {page[1]}"
    if "://" in name:
        return "this is an address\ndownload what is there, and give its path"
    return "no such file or folder\ncheck the path"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and all that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
