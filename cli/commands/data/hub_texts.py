"""Data sets of the Hugging Face Hub: their files of text, fetched into this machine's cache."""

from __future__ import annotations

import shutil
from pathlib import Path

from peer.errors import ConfigError, ResourceError

_TIMEOUT_S = 30.0
_CARD = "README.md"  # describes the data set, and is none of its texts


def fetched(name: str) -> Path:
    """Return the folder with the text files of the data set with that id. Raises ConfigError without a network or such
    a data set, ResourceError if the disk is too small."""
    from huggingface_hub import HfApi, constants, snapshot_download

    from peer.data.packed_files import suffixes_of
    from peer.data.text_files import TEXT_SUFFIXES
    from swarm.run.hub_models import hub_failures

    try:
        found = HfApi().dataset_info(name, files_metadata=True, timeout=_TIMEOUT_S)
        files = {
            file.rfilename: file.size or 0
            for file in found.siblings or ()
            if suffixes_of(Path(file.rfilename))[0] in TEXT_SUFFIXES
            and "*" not in file.rfilename
            and file.rfilename != _CARD
        }
        if not files:
            raise ConfigError(f"{name} has no file of text on the Hub: choose a data set of .parquet, .jsonl or .txt")
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        needed, free = sum(files.values()), shutil.disk_usage(cache).free
        if needed > free:
            raise ResourceError(
                f"{name} has {needed / 1e9:.1f} GB of text and {cache} has {free / 1e9:.1f} GB free: free some space,"
                " or set HF_HOME to another disk"
            )
        patterns = [*files]
        return Path(snapshot_download(name, repo_type="dataset", revision=found.sha, allow_patterns=patterns))
    except hub_failures() as error:
        raise ConfigError(
            f"{name} is no file or folder here, and cannot be fetched from the Hub ({type(error).__name__}): correct"
            f" it, or fetch it where there is a network, with `hf download --repo-type dataset {name}`, and name its"
            " folder"
        ) from error
