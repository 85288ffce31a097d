"""A run's constitution: what its author writes (RUN.toml) and what its authority signs (the manifest).

A run is named by the hash of its manifest, so nobody can change a rule without founding another run. The manifest holds
what every peer must agree on and nothing local: no paths but the data folder's, which each peer may override.
"""

from __future__ import annotations

from base64 import b32encode
from typing import Final

import msgspec
from blake3 import blake3

from optim.config import CodecConfig, OuterConfig
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.errors import NotAdmitted, ProtocolViolation
from peer.identity import Identity, Signed, is_peer_id, open_body, sign_body

PROTOCOL_VERSION: Final = 2
MANIFEST_BYTES_MAX: Final = 64 << 10
TOKENIZER_BYTES_MAX: Final = 64 << 20
BYTES_TOKENIZER: Final = "bytes"
RUN_ID_BYTES: Final = 20

_KIND: Final = "manifest"


class RunRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who takes part and for how long. `rounds` 0 means for ever; `patience_s` 0 means deadlines adapt to what is
    measured; above 0 it is a floor under them (the only deadline a user sets)."""

    name: str
    open: bool = True
    min_peers: int = 2
    max_peers: int = 64
    rounds: int = 0
    seed: int = 0
    patience_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 64 or not self.name.isprintable():
            raise ValueError("name must have 1 to 64 printable characters")
        if not 1 <= self.min_peers <= self.max_peers:
            raise ValueError(f"min_peers is {self.min_peers}: it must lie between 1 and max_peers ({self.max_peers})")
        if self.max_peers > 1024:
            raise ValueError(f"max_peers is {self.max_peers}: one group holds at most 1024")
        if self.rounds < 0:
            raise ValueError(f"rounds is {self.rounds}: give 0 (for ever) or more")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}: it must lie between 0 and 2**63 - 1")
        if not 0 <= self.patience_s <= 3600:
            raise ValueError(f"patience_s is {self.patience_s}: it must lie between 0 (adaptive) and 3600")


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`source`: "bytes", or the path of a `tokenizer.json` or of a folder that holds one."""

    source: str = BYTES_TOKENIZER


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The agreed rules of one run. `genesis` is the state hash of round 0, `tokenizer` "bytes" or the hex blake3 of the
    run's tokenizer.json, `authority` the peer id that signs, `created_at` seconds since the Unix epoch."""

    protocol: int
    authority: str
    created_at: int
    run: RunRules
    model: ModelConfig
    tokenizer: str
    data: DataConfig
    inner: InnerConfig
    outer: OuterConfig
    codec: CodecConfig
    genesis: bytes

    def __post_init__(self) -> None:
        if not is_peer_id(self.authority):
            raise ValueError("authority is not the id of an Ed25519 peer")
        if len(self.genesis) != 32:
            raise ValueError("genesis is not a hash of 32 bytes")
        if self.tokenizer != BYTES_TOKENIZER and len(self.tokenizer) != 64:
            raise ValueError("tokenizer is neither bytes nor a hash")
        check_fit(self.model, self.data, self.tokenizer)

    @property
    def run_id(self) -> str:
        """32 characters that name the run: base32 of a 160-bit hash of everything above."""
        return run_id_text(blake3(msgspec.msgpack.encode(self)).digest(RUN_ID_BYTES))


def check_fit(model: ModelConfig, data: DataConfig, tokenizer: str) -> None:
    """What no section can check alone; raises ValueError."""
    if data.seq_len > model.max_seq_len:
        raise ValueError(f"seq_len is {data.seq_len}: the model's max_seq_len is only {model.max_seq_len}")
    if tokenizer == BYTES_TOKENIZER and model.vocab_size < 256:
        raise ValueError(f"vocab_size is {model.vocab_size}: the byte tokenizer needs at least 256")


def sign_manifest(identity: Identity, manifest: Manifest) -> Signed:
    """The authority's signature; ValueError if `identity` is not the authority that the manifest names."""
    if identity.peer_id != manifest.authority:
        raise ValueError("the manifest names another authority than the signer")
    return sign_body(identity, _KIND, manifest)


def open_manifest(signed: Signed, run_id: str | None = None) -> Manifest:
    """Check what a peer or a file handed over as a run's manifest.

    Raises ProtocolViolation if it is forged or malformed, NotAdmitted if it is sound but of another protocol version
    or (given `run_id`) of another run.
    """
    if len(signed.body) > MANIFEST_BYTES_MAX:
        raise ProtocolViolation(f"the manifest is larger than {MANIFEST_BYTES_MAX} bytes")
    preamble = open_body(signed, _KIND, _Preamble)  # first: another version may have other fields
    check_protocol(preamble.protocol)
    manifest = open_body(signed, _KIND, Manifest, signer=preamble.authority)
    if run_id is not None:
        check_run(manifest, run_id)
    return manifest


def check_protocol(version: int) -> None:
    """NotAdmitted if the other side speaks another version of the protocol."""
    if version == PROTOCOL_VERSION:
        return
    side = "this machine" if version > PROTOCOL_VERSION else "the other side"
    raise NotAdmitted(
        f"the run speaks protocol version {version} and this software version {PROTOCOL_VERSION}:"
        f" upgrade barnraise on {side}."
    )


def check_run(manifest: Manifest, run_id: str) -> None:
    """NotAdmitted if `run_id` names another run than the manifest's."""
    if manifest.run_id != run_id:
        raise NotAdmitted(
            f"that peer belongs to run {manifest.run_id}, not to {run_id}: ask for an invite to the right run."
        )


class _Preamble(msgspec.Struct, frozen=True):
    """What every version of the manifest has."""

    protocol: int
    authority: str


def run_id_text(raw: bytes) -> str:
    """The 32-character form of a run id."""
    return b32encode(raw).decode().lower()
