"""The way of a pipeline to the Hugging Face Hub: what could refuse it is asked before a training, and not after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from utils.core.errors import UserError
from utils.core.hub import log_in
from utils.diffusion.export import PIPELINE_INDEX, PUBLISHED, check_pipeline, write_card
from utils.diffusion.model_card import loaded_from
from utils.options.flags import OutputOptions

TOKENS = "https://huggingface.co/settings/tokens"


def check_hub(options: OutputOptions) -> str:
    """Asks the Hub whether it would take the pipeline of `output_dir`, and makes the repository where there is none.

    Checks name, network, token and rights, in this order. Returns the repository's address. Raises UserError with what to do.
    """
    with _problems_in_a_line(options, "cannot push to"):
        validate_repo_id(_name(options))
        api = _api(options)
        token = api.whoami().get("auth", {}).get("accessToken", {})
        if token.get("role") == "read":
            raise UserError(
                f"cannot push to {_name(options)}: the token {token.get('displayName', '')!r} can only read\n"
                f"make a token with write access at {TOKENS}"
            )
        repository = api.create_repo(_name(options), private=options.hub_private_repo or None, exist_ok=True)
        # The first request of an upload, which asks for the right to write; so small a file is not sent on.
        api.preupload_lfs_files(repository.repo_id, [CommitOperationAdd("README.md", b"-")])
    return str(repository)


def push_to_hub(options: OutputOptions) -> str:
    """Checks the pipeline in `output_dir`, then uploads it with its card and samples. Returns the repository's address.

    The card then says from where to load it. Raises RuntimeError for a pipeline that does not work, UserError when the Hub
    refuses or cannot be reached.
    """
    folder = Path(options.output_dir)
    check_pipeline(folder)
    with _problems_in_a_line(options, f"the pipeline is whole in {folder}, but cannot be pushed to"):
        api = _api(options)
        repository = api.create_repo(_name(options), private=options.hub_private_repo or None, exist_ok=True)
        card = (folder / "README.md").read_text()
        write_card(folder, loaded_from(card, repository.repo_id))
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder, allow_patterns=list(PUBLISHED))
    return str(repository)


def has_pipeline(output_dir: Path) -> bool:
    return (output_dir / PIPELINE_INDEX).exists()


def _api(options: OutputOptions) -> HfApi:
    return HfApi(token=options.hub_token)


def _name(options: OutputOptions) -> str:
    return options.hub_model_id or Path(options.output_dir).resolve().name


@contextmanager
def _problems_in_a_line(options: OutputOptions, doing: str) -> Iterator[None]:
    """What goes wrong on the way to the Hub, which is of many types, becomes a UserError."""
    name = _name(options)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = (str(getattr(error, "server_message", None) or "") or str(error) or type(error).__name__).strip().splitlines()[0]
        if isinstance(error, HFValidationError):
            reason = "this is not a name of a repository\nset --hub_model_id to name or user/name (letters, digits, -, _ and .)"
        elif isinstance(error, LocalTokenNotFoundError):
            reason = f"there is no token\nmake one at {TOKENS}, then run `hf auth login`, or set HF_TOKEN or --hub_token"
        elif isinstance(error, OfflineModeIsEnabled):
            reason = "HF_HUB_OFFLINE is set\nunset it, or leave --push_to_hub out"
        elif status == 401:
            mend = "set another --hub_token" if options.hub_token else log_in()
            reason = f"the Hub does not accept the token ({said})\n{mend}"
        elif status == 403:
            reason = f"the token may not write there ({said})\nmake another token at {TOKENS}, or set another --hub_model_id"
        elif status is not None:
            reason = f"the Hub answered {status} ({said})\ntry again later"
        else:
            reason = f"the Hub cannot be reached ({type(error).__name__}: {said})\ncheck the network"
        raise UserError(f"{doing} {name}: {reason}") from error
