"""Which tokenizer a new run uses: bytes, or the `tokenizer.json` that its author names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from blake3 import blake3

from peer.data.tokenizer import ByteTokenizer, load_tokenizer
from peer.errors import ConfigError
from swarm.run.config import RunConfig
from swarm.run.manifest import BYTES_TOKENIZER, TOKENIZER_BYTES_MAX

FILE: Final = "tokenizer.json"


def read_tokenizer(run: RunConfig) -> tuple[bytes, str, int]:
    """The file's content (empty for bytes), its name in the manifest, and how many ids it has. Raises ConfigError."""
    source = run.tokenizer.source
    if source == BYTES_TOKENIZER and run.pretrained is not None and (Path(run.pretrained.init) / FILE).is_file():
        source = run.pretrained.init
    if source == BYTES_TOKENIZER:
        return b"", BYTES_TOKENIZER, ByteTokenizer.vocab_size
    path = Path(source)
    if path.is_dir():
        path = path / FILE
    try:
        if path.stat().st_size > TOKENIZER_BYTES_MAX:
            raise ConfigError(f"{path} is larger than any tokenizer: name a tokenizer.json in [tokenizer] source.")
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): mend [tokenizer] source.") from error
    return content, blake3(content).hexdigest(), load_tokenizer(str(path)).vocab_size
