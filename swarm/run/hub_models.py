"""Checkpoints and tokenizers that RUN.toml names by a path, or by their id on the Hugging Face Hub.

An id is looked up in this machine's cache of the Hub, and downloaded if it is missing there: the weights as safetensors
and the JSON beside them, and nothing that could be run.
"""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any, Final

from peer.data.tokenizer_rules import TOKENIZER_BYTES_MAX
from peer.errors import ConfigError, ResourceError

TOKENIZER: Final = "tokenizer.json"
CHAT: Final = "tokenizer_config.json"
"""As a suffix: this file, and the others that a chat template may be in."""
_CHAT_FILES: Final = (CHAT, "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_WEIGHTS: Final = ".safetensors"
_TIMEOUT_S: Final = 30.0


def expanded(source: str) -> Path:
    """Return the path with `~` in it replaced. Raises ConfigError for an unknown user."""
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{source} names an unknown home directory: write the whole path") from error


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a model's id, OWNER/NAME."""
    return _ID.fullmatch(name) is not None


def hub_id(source: str) -> str:
    """Return the id of the Hub's model that RUN.toml names, "" for a path: that is this machine's own affair."""
    return source if is_hub_id(source) and not expanded(source).exists() else ""


def located(source: str, suffix: str = _WEIGHTS) -> Path:
    """Return the path that RUN.toml names, or the folder of the checkpoint with that id, which holds a file with that
    suffix: a tokenizer alone is `tokenizer.json`. Raises ConfigError, ResourceError if the disk is too small."""
    path = expanded(source)
    if path.exists() or not is_hub_id(source):
        return path
    return _cached(source, suffix) or _downloaded(source, suffix)


def in_cache(name: str) -> Path | None:
    """Return the folder of the checkpoint with that id in this machine's cache of the Hub; None if there is none."""
    return _cached(name, _WEIGHTS) if name else None


def _cached(name: str, suffix: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if any(found.name.endswith(suffix) for found in folder.iterdir()) else None


def _downloaded(name: str, suffix: str) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        found = HfApi().model_info(name, files_metadata=True, timeout=_TIMEOUT_S)
        files = {file.rfilename: file.size or 0 for file in found.siblings or () if _is_wanted(file, suffix)}
        if not any(file.endswith(suffix) for file in files):
            raise ConfigError(
                f"{name} has no file {suffix} on the Hub: choose a model in safetensors, or name a folder"
            )
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        needed, free = sum(files.values()), shutil.disk_usage(cache).free
        if needed > free:
            raise ResourceError(
                f"{name} has {needed / 1e9:.1f} GB and {cache} has {free / 1e9:.1f} GB free: free some space, or set"
                " HF_HOME to another disk"
            )
        return Path(snapshot_download(name, revision=found.sha, allow_patterns=list(files)))
    except hub_failures() as error:
        raise ConfigError(
            f"{name} is no folder here, not in the Hugging Face cache of this machine, and cannot be downloaded"
            f" ({type(error).__name__}): correct it, or fetch it where there is a network, with `hf download {name}`"
        ) from error


def _is_wanted(file: Any, suffix: str) -> bool:
    """Whether a file of the Hub belongs to a checkpoint: in its folder itself, of a size that the Hub reports."""
    name, size = str(file.rfilename), file.size
    if "/" in name or "*" in name or not isinstance(size, int) or size < 0:
        return False
    if name.endswith(_WEIGHTS):
        return suffix == _WEIGHTS
    if name in _CHAT_FILES and suffix in (CHAT, _WEIGHTS):
        return size <= TOKENIZER_BYTES_MAX
    return name.endswith(".json") and size <= TOKENIZER_BYTES_MAX and (suffix == _WEIGHTS or name == suffix)


def hub_failures() -> tuple[type[Exception], ...]:
    """Return what fetching from the Hub raises."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    return (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, *client_errors())


def client_errors() -> tuple[type[Exception], ...]:
    """Return what the Hub's HTTP client raises, another library in other releases (OSErrors for requests)."""
    from huggingface_hub import get_session

    client = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    return (getattr(client, "HTTPError", OSError),)
