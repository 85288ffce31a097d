"""The tokenizer of a new run: bytes, or the `tokenizer.json` that RUN.toml names."""

from __future__ import annotations

from typing import Final

import msgspec
from blake3 import blake3

from peer.data.tokenizer import ByteTokenizer
from peer.data.tokenizer import read_tokenizer as parse_tokenizer
from peer.data.tokenizer_rules import TOKENIZER_BYTES_MAX
from peer.errors import ConfigError
from peer.files import read_bounded
from peer.model.text.rules import STOPS_MAX, TextRules
from swarm.run.config import RunConfig
from swarm.run.hub_models import located
from swarm.run.sections import AUTO_TOKENIZER, BYTES_TOKENIZER

FILE: Final = "tokenizer.json"


def read_tokenizer(run: RunConfig) -> tuple[bytes, str, int]:
    """Return the file (empty for bytes), its name in the manifest and its number of ids. Raises ConfigError.

    A checkpoint is trained on bytes only if RUN.toml says so: they would mean other text to it."""
    source = run.tokenizer.source
    if source == AUTO_TOKENIZER and run.pretrained is not None:
        folder = located(run.pretrained.init)
        source = str(folder)
        if not (folder / FILE).is_file():
            raise ConfigError(
                f"{source} has no {FILE}: convert its tokenizer (transformers:"
                f" AutoTokenizer.from_pretrained({source!r}).save_pretrained({source!r})), or name one in [tokenizer]"
                ' source; source = "bytes" trains on bytes'
            )
    if source in (AUTO_TOKENIZER, BYTES_TOKENIZER):
        return b"", BYTES_TOKENIZER, ByteTokenizer.vocab_size
    path = located(source, FILE)
    if path.is_dir():
        path = path / FILE
    try:
        content = read_bounded(path, TOKENIZER_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): correct [tokenizer] source") from error
    return content, blake3(content).hexdigest(), parse_tokenizer(content, str(path)).vocab_size


def end_of_text(run: RunConfig, content: bytes, of_checkpoint: str) -> str | None:
    """Return the token that ends a text in a new run, "" or None for none. `content`: of the run's tokenizer;
    `of_checkpoint`: the token that the checkpoint ends texts with. Raises ConfigError for one that RUN.toml names and
    the tokenizer does not have."""
    named = run.data.end_of_text
    token = of_checkpoint if named is None else named
    if not token:
        return named
    if content and len(parse_tokenizer(content).encode(token)) == 1:
        return token
    if named is None:
        return None
    if not content:
        raise ConfigError("the byte tokenizer has no token that ends a text: leave [data] end_of_text out")
    raise ConfigError(f"[data] end_of_text {named!r} is no single token of the run's tokenizer: name one that is")


def ended_by(text: TextRules, content: bytes, token: str | None) -> TextRules:
    """Return the rules of a run whose texts end with `token`, which the tokenizer of `content` has: so does an answer
    of its model."""
    if not token:
        return text
    (stop,) = parse_tokenizer(content).encode(token)
    if stop in text.stops or len(text.stops) == STOPS_MAX:
        return text
    return msgspec.structs.replace(text, stops=(*text.stops, stop), eos=text.eos or token)
