"""How the rules of a run reach a newcomer: the signed manifest from any member, and the tokenizer if it has its own.

Neither needs trust in who hands it over: the manifest must hash to the run id of the invite and the tokenizer to what
the manifest says.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from peer.errors import CheckpointError, NotAdmitted, ProtocolViolation, ResourceError
from peer.identity import Signed
from peer.net.rpc import Call, Method, Rpc
from swarm.run.manifest import BYTES_TOKENIZER, MANIFEST_BYTES_MAX, TOKENIZER_BYTES_MAX, Manifest, open_manifest

MANIFEST_FILE: Final = "manifest.msgpack"
TOKENIZER_FILE: Final = "tokenizer.json"


class AskManifest(msgspec.Struct, frozen=True):
    """The manifest of run `run_id`, please."""

    run_id: str


class AskTokenizer(msgspec.Struct, frozen=True):
    """The run's tokenizer.json, please."""


class TokenizerSent(msgspec.Struct, frozen=True):
    """The payload is the file."""


MANIFEST: Final = Method("run.manifest", AskManifest, Signed, open=True)
TOKENIZER: Final = Method("run.tokenizer", AskTokenizer, TokenizerSent, reply_payload_max=TOKENIZER_BYTES_MAX)


def serve_run_files(rpc: Rpc, signed: Signed, tokenizer: bytes) -> None:
    """Hand out this run's manifest to everybody and its tokenizer (empty for "bytes") to members."""
    run_id = open_manifest(signed).run_id

    async def manifest(call: Call[AskManifest]) -> Signed:
        if call.body.run_id != run_id:
            raise NotAdmitted(
                f"this peer is in run {run_id}, not in {call.body.run_id}: ask for an invite to the right run."
            )
        return signed

    async def tokenizer_file(call: Call[AskTokenizer]) -> tuple[TokenizerSent, bytes]:
        return TokenizerSent(), tokenizer

    rpc.register(MANIFEST, manifest)
    rpc.register(TOKENIZER, tokenizer_file)


async def fetch_manifest(rpc: Rpc, peer: str, run_id: str, timeout_s: float) -> Signed:
    """The checked manifest of `run_id` from `peer`. Raises NotAdmitted (other run or version), ProtocolViolation
    (forged) and what a call raises."""
    reply = await rpc.call(peer, MANIFEST, AskManifest(run_id), timeout_s=timeout_s)
    open_manifest(reply.body, run_id)
    return reply.body


async def fetch_tokenizer(rpc: Rpc, peer: str, manifest: Manifest, timeout_s: float) -> bytes:
    """The run's tokenizer.json from `peer`, checked against the manifest; empty if the run has none."""
    if manifest.tokenizer == BYTES_TOKENIZER:
        return b""
    reply = await rpc.call(peer, TOKENIZER, AskTokenizer(), timeout_s=timeout_s, bulk=True)
    check_tokenizer(manifest, reply.payload)
    return bytes(reply.payload)


def check_tokenizer(manifest: Manifest, content: bytes | memoryview) -> None:
    """ProtocolViolation unless `content` is the tokenizer.json that the manifest names."""
    if manifest.tokenizer != BYTES_TOKENIZER and blake3(content).hexdigest() != manifest.tokenizer:
        raise ProtocolViolation("the tokenizer.json is not the one that the run's manifest names")


def save_run_files(home: Path, signed: Signed, tokenizer: bytes) -> None:
    """Keep manifest and tokenizer under `home`; ResourceError if it cannot be written."""
    write_atomically(home / MANIFEST_FILE, msgspec.msgpack.encode(signed))
    if tokenizer:
        write_atomically(home / TOKENIZER_FILE, tokenizer)


def load_run_files(home: Path) -> tuple[Signed, bytes] | None:
    """What `save_run_files` kept, checked; None if there is none. CheckpointError if it is damaged, ResourceError if it
    cannot be read."""
    path = home / MANIFEST_FILE
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ResourceError(f"{path} cannot be read ({error.strerror}): check the path and who owns it.") from error
    try:
        if len(raw) > 2 * MANIFEST_BYTES_MAX:
            raise CheckpointError(f"{path} is no manifest: delete it and join again.")
        signed = msgspec.msgpack.decode(raw, type=Signed)
        manifest = open_manifest(signed)
        tokenizer = b"" if manifest.tokenizer == BYTES_TOKENIZER else (home / TOKENIZER_FILE).read_bytes()
        check_tokenizer(manifest, tokenizer)
    except (OSError, msgspec.MsgspecError, ProtocolViolation) as error:
        raise CheckpointError(
            f"{path} or the tokenizer beside it is damaged ({error}): delete both and join again."
        ) from error
    return signed, tokenizer


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by a complete file or leave it as it was; ResourceError names the remedy."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = ""
    except OSError as error:
        raise ResourceError(
            f"cannot write {path} ({error.strerror}): free some space or choose another --home."
        ) from error
    finally:
        if temporary:
            os.unlink(temporary)
