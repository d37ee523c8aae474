"""What went wrong on the Hugging Face Hub, in the words of these scripts. Imports no torch."""

import contextlib
import os
import re
from collections.abc import Iterator

from utils.core.errors import UserError, in_full

_NOT_HERE = "no folder here has this name, and "
_NO_CONNECTION = {"ConnectionError", "LocalEntryNotFoundError", "TransportError", "OfflineModeIsEnabled"}
_SAID = (  # by a library -> what it means, and what to do
    (r"available configs: \[(.*?)\]", "it has several configs\nset --dataset_config_name to one of {}"),
    (r"BuilderConfig (\S+) not found. Available: \[(.*?)\]", "it has no config '{}'\nset --dataset_config_name to one of {}"),
    (r"Revision '(.*?)' doesn't exist for dataset", "it has no revision {}\nset --dataset_revision to one that it has"),
    (r"Unknown split \"?(.*?)\"?\. Should be one of \[(.*?)\]", "it has no split {}\nset --dataset_split to one of {}"),
    (r"Unable to load weights from checkpoint file for '(.*?)'", "its weights {} are damaged\ndownload or make them again"),
    ("(Parquet) magic bytes not found", "it is no {} file\ndownload it again (after a `git clone`: `git lfs pull`)"),
    ("no file named (model_index.json) found", "it has no {}\nuse the folder of a finished run, or of another pipeline"),
)


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
    """What to say of `error`, which came while `name`, a `kind` ("dataset" or "model"), was loaded; with advice if it is
    known."""
    from huggingface_hub import get_token

    is_here = os.path.exists(name)
    if is_only_a_path(name) and not is_here:
        return no_such_path(name)
    errors = list(_chain(error))
    classes = {each.__name__ for found in errors for each in type(found).__mro__}
    text = " ".join(" ".join(str(found).split()) for found in errors)
    if "GatedRepoError" in classes or f"is a gated {kind}" in text:
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
        return f"it is gated\nask for access at {page}, {'or' if get_token() else 'then'} {log_in()}"
    not_there, no_way = classes & {"RepositoryNotFoundError", "DatasetNotFoundError"}, classes & _NO_CONNECTION
    if is_here and (not_there or no_way):  # so a library took it for a name on the Hub
        return f"it is here, but no {kind} is found in it ({in_full(error)})\ncheck its files"
    for said, meaning in _SAID:
        if found := re.search(said, text):
            return meaning.format(*(re.sub("['\"]", "", part) for part in found.groups()))
    if not_there:
        return f"{_NOT_HERE}it doesn't exist on the Hub, or it is private\ncheck the name, or {log_in()}"
    if "UnicodeDecodeError" in classes:
        return f"its text is not UTF-8 ({in_full(error)})\nsave the file as UTF-8"
    return _refused(errors) or (_unreachable(error) if no_way else f"{in_full(error)}\ncheck its name or path, and its files")


def _refused(errors: list[BaseException]) -> str | None:
    """What to say of the status with which the Hub answered; None where it did not, or it says nothing of the Hub."""
    from huggingface_hub import get_token

    status = next(filter(None, (getattr(getattr(found, "response", None), "status_code", None) for found in errors)), 0)
    if status == 401:
        return f"the Hub {'does not accept the token' if get_token() else 'asks for a token'}\n{log_in()}"
    if status != 429 and status < 500:
        return None
    reason = ": too many requests from this address or account" if status == 429 else ""
    return f"the Hub answered {status}{reason}\ntry again later"


def _unreachable(error: BaseException) -> str:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        why = "it is not in the cache, and HF_HUB_OFFLINE does not allow a download"
        return f"{_NOT_HERE}{why}\nunset HF_HUB_OFFLINE for one run"
    why = f"the Hub could not be reached, or the connection broke ({in_full(error)})"
    return f"{_NOT_HERE}{why}\ncheck the name and the network, and start again"


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
