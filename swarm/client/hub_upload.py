"""Upload of an export to the Hugging Face Hub, with the token that `hf auth login` has kept or HF_TOKEN names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from peer.errors import ConfigError, NetworkError
from swarm.run.hub_models import client_errors, is_hub_id

UPLOADED: Final = (
    "README.md",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "model.safetensors",
)
"""The files that an export writes; other files in its folder stay."""
_LOGIN: Final = "log in with `hf auth login`, or set HF_TOKEN"


def check_push(name: str) -> None:
    """Raise ConfigError unless `name` can be an id of the Hub, the Hub may be used, and there is a token for it."""
    from huggingface_hub import constants, get_token

    if not is_hub_id(name):
        raise ConfigError(f"--push {name!r} is no id of the Hugging Face Hub: write ORG/NAME")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("nothing can be pushed to the Hub while HF_HUB_OFFLINE is set: unset it, or leave --push out")
    if get_token() is None:
        raise ConfigError(f"there is no token of the Hugging Face Hub on this machine: {_LOGIN}")


def push(folder: Path, name: str, private: bool, message: str) -> str:
    """Upload an export to the model `name`, which is made if it is missing, and return its address. Raises ConfigError
    for a token that may not, NetworkError without a network."""
    from huggingface_hub import HfApi

    with _failures_told(name, folder):
        api = HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=list(UPLOADED), commit_message=message)
        return f"{api.endpoint}/{name}"


@contextmanager
def _failures_told(name: str, folder: Path) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    kept = f"the export is in {folder}"
    failures: tuple[type[Exception], ...] = (OfflineModeIsEnabled, OSError, *client_errors())
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status == 401:
            raise ConfigError(f"the Hugging Face Hub does not know this machine's token: {_LOGIN}; {kept}") from error
        if status in (403, 404):
            raise ConfigError(
                f"this machine's token may not write to {name} on the Hugging Face Hub: use one that may, or choose"
                f" another name; {kept}"
            ) from error
        raise NetworkError(f"the Hugging Face Hub refuses {name} ({status}): try again later; {kept}") from error
    except failures as error:
        raise NetworkError(
            f"{name} cannot be pushed to the Hugging Face Hub ({type(error).__name__}): try again where there is a"
            f" network; {kept}"
        ) from error
