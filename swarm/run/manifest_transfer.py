"""Transfer of the run files to a joiner: the signed manifest from any member, and the tokenizer if the run has one.

Neither needs trust in the sender. The manifest must have the run id of the invite as its hash, and the tokenizer the
hash in the manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from peer.bounds import Name
from peer.data.tokenizer_rules import TOKENIZER_BYTES_MAX
from peer.decoding import MALFORMED, told
from peer.errors import CheckpointError, NotAdmitted, ProtocolViolation, ResourceError
from peer.files import read_bounded, write_atomically
from peer.identity import Signed
from peer.net.method import Empty
from peer.net.rpc import Call, Method, Rpc
from peer.net.wire import HEADER_BYTES
from swarm.run.manifest import MANIFEST_BYTES_MAX, AnyManifest, open_any_manifest
from swarm.run.sections import BYTES_TOKENIZER

MANIFEST_FILE: Final = "manifest.msgpack"
TOKENIZER_FILE: Final = "tokenizer.json"


class AskManifest(msgspec.Struct, frozen=True):
    """Asks for the manifest of a run."""

    run_id: Name


MANIFEST: Final = Method(
    "run.manifest", AskManifest, Signed, access="open", header_bytes=MANIFEST_BYTES_MAX + HEADER_BYTES
)
TOKENIZER: Final = Method(
    "run.tokenizer",
    Empty,
    Empty,
    reply_payload_max=TOKENIZER_BYTES_MAX,
    access="client",
    replies_bounded=True,
)


def serve_run_files(rpc: Rpc, signed: Signed, tokenizer: bytes) -> None:
    """Serve the manifest to every peer, and the tokenizer (empty for "bytes") to members."""
    run_id = open_any_manifest(signed).run_id

    async def manifest(call: Call[AskManifest]) -> Signed:
        if call.body.run_id != run_id:
            raise NotAdmitted("this peer is in another run: ask for an invite to the right run")
        return signed

    async def tokenizer_file(call: Call[Empty]) -> tuple[Empty, bytes]:
        return Empty(), tokenizer

    rpc.register(MANIFEST, manifest)
    rpc.register(TOKENIZER, tokenizer_file)


async def fetch_manifest(rpc: Rpc, peer: str, run_id: str, timeout_s: float) -> Signed:
    """Return the checked manifest of `run_id` from `peer`.

    Raises NotAdmitted (other run or version), ProtocolViolation (forged) and what a call raises.
    """
    reply = await rpc.call(peer, MANIFEST, AskManifest(run_id), timeout_s=timeout_s)
    open_any_manifest(reply.body, run_id)
    return reply.body


async def fetch_tokenizer(rpc: Rpc, peer: str, manifest: AnyManifest, timeout_s: float) -> bytes:
    """Return the run's tokenizer.json from `peer`, checked against the manifest; empty if the run has none."""
    if manifest.tokenizer == BYTES_TOKENIZER:
        return b""
    reply = await rpc.call(peer, TOKENIZER, Empty(), timeout_s=timeout_s, bulk=True)
    check_tokenizer(manifest, reply.payload)
    return bytes(reply.payload)


def check_tokenizer(manifest: AnyManifest, content: bytes | memoryview) -> None:
    """Raise ProtocolViolation unless `content` is the tokenizer.json that the manifest names."""
    if manifest.tokenizer != BYTES_TOKENIZER and blake3(content).hexdigest() != manifest.tokenizer:
        raise ProtocolViolation("the tokenizer.json is not the one that the run's manifest names")


def save_run_files(home: Path, signed: Signed, tokenizer: bytes) -> None:
    """Keep manifest and tokenizer under `home`; ResourceError if that cannot be written."""
    write_atomically(home / MANIFEST_FILE, msgspec.msgpack.encode(signed))
    if tokenizer:
        write_atomically(home / TOKENIZER_FILE, tokenizer)


def load_manifest(home: Path) -> AnyManifest | None:
    """Return the manifest that `save_run_files` kept, checked; None if there is none. Raises as `load_run_files`."""
    path = home / MANIFEST_FILE
    signed = _signed(path)
    try:
        return None if signed is None else open_any_manifest(signed)
    except (ProtocolViolation, *MALFORMED) as error:
        raise _damaged(path, error) from error


def _signed(path: Path) -> Signed | None:
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ResourceError(f"{path} cannot be read ({error.strerror}): check the path and its owner") from error
    if len(raw) > 2 * MANIFEST_BYTES_MAX:
        raise CheckpointError(f"{path} is no manifest: delete it and join again")
    try:
        return msgspec.msgpack.decode(raw, type=Signed)
    except MALFORMED as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} or the tokenizer beside it is damaged ({told(error)}): delete both and join again")


def load_run_files(home: Path) -> tuple[Signed, bytes] | None:
    """Return what `save_run_files` kept, checked; None if there is none.

    Raises CheckpointError if it is damaged, ResourceError if it cannot be read.
    """
    path = home / MANIFEST_FILE
    signed = _signed(path)
    if signed is None:
        return None
    try:
        manifest = open_any_manifest(signed)
        tokenizer = (
            b"" if manifest.tokenizer == BYTES_TOKENIZER else read_bounded(home / TOKENIZER_FILE, TOKENIZER_BYTES_MAX)
        )
        check_tokenizer(manifest, tokenizer)
    except (OSError, ProtocolViolation, *MALFORMED) as error:
        raise _damaged(path, error) from error
    return signed, tokenizer
