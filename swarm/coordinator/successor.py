"""The successor of a lost coordinator's machine: the operator who keeps a file with its key, locked by a passphrase.

The key is the run's authority: all invites, bans and terms rest on it, so its holder is the coordinator, and without it
no machine can become one. The file holds it as `nacl.secret.SecretBox` encrypts it, under a key that Argon2id (RFC
9106) derives from the passphrase, and the addresses of peers of the run, which are no secret.

The machine that takes over gets everything else from the members. It begins as one whose disk was put back from a
backup: it votes on nothing and starts no term before the operator says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import nacl.exceptions
import nacl.pwhash.argon2id as argon2id
import nacl.secret
import nacl.utils
import trio

from peer.bounds import Address, Name
from peer.decoding import MALFORMED
from peer.errors import ConfigError, NetworkError, ResourceError
from peer.files import create_private, read_bounded
from peer.identity import Identity
from swarm.client.session import RunClient, open_client
from swarm.placement.commits import fetch_commit, save_commit
from swarm.protocol.agreement.records import RESTORED_KEY
from swarm.rounds.records import RecordFiles
from swarm.run.home import Home
from swarm.run.invite import ADDRESSES_MAX, Invite
from swarm.run.manifest import open_manifest
from swarm.run.manifest_transfer import load_run_files, save_run_files
from swarm.run.peer_context import Place

FILE_BYTES_MAX: Final = 1 << 16
PASSPHRASE_MIN: Final = 8  # characters
TRIES: Final = 5
PAUSE_S: Final = 2.0
_OPS, _MEMORY = argon2id.OPSLIMIT_MODERATE, argon2id.MEMLIMIT_MODERATE  # 256 MiB; 0.5 s here


class SuccessorFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a successor's file."""

    run: Annotated[str, msgspec.Meta(max_length=64)]
    """The run's name."""
    run_id: Name
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=ADDRESSES_MAX)]
    salt: Annotated[bytes, msgspec.Meta(min_length=argon2id.SALTBYTES, max_length=argon2id.SALTBYTES)]
    locked: Annotated[bytes, msgspec.Meta(max_length=256)]
    """The seed of the authority's key, encrypted."""
    barnraise_successor: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1


@dataclass(frozen=True)
class Successor:
    """The key of a run's authority, and where peers of the run may be found."""

    run: str
    run_id: str
    identity: Identity
    addresses: tuple[str, ...]

    @property
    def others(self) -> tuple[str, ...]:
        """The addresses that are not the lost coordinator's."""
        return tuple(address for address in self.addresses if not address.endswith(f"/p2p/{self.identity.peer_id}"))


def make_successor(home: Home, path: Path, passphrase: Callable[[], str]) -> str:
    """Write the file of a successor of the coordinator in `home` to `path`, which must not exist. `passphrase` is asked
    once all else is in order. Return the run's name. Raises ConfigError, ResourceError."""
    kept = load_run_files(home.path)
    if kept is None:
        raise ConfigError(f"{home.path} holds no run: name the coordinator's with --home")
    manifest, identity = open_manifest(kept[0]), Identity.load_or_create(home.identity)
    if manifest.authority != identity.peer_id:
        raise ConfigError(f"{home.path} is not the home of a coordinator: name the one that it runs from with --home")
    addresses = tuple(dict.fromkeys((*_printed(home), *home.living_addresses())))[:ADDRESSES_MAX]
    if not addresses:
        raise ConfigError(
            f"no peer of the run has been seen from {home.path} yet: start the coordinator once, then ask"
        )
    if path.exists():
        raise _taken(path)
    words = passphrase()
    _check_passphrase(words)
    salt = nacl.utils.random(argon2id.SALTBYTES)
    locked = nacl.secret.SecretBox(_key(words, salt)).encrypt(identity.seed)
    content = SuccessorFile(manifest.run.name, manifest.run_id, addresses, salt, bytes(locked))
    try:
        create_private(path, msgspec.json.encode(content) + b"\n")
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise ResourceError(f"cannot write {path} ({error.strerror}): name a file in another folder") from error
    return manifest.run.name


def open_successor(path: Path, passphrase: str, more: tuple[str, ...] = ()) -> Successor:
    """Return what a successor's file holds; `more`: further addresses of peers of the run, tried first. Raises
    ConfigError for another file or a wrong passphrase, ResourceError if it cannot be read."""
    content = read_successor(path)
    try:
        seed = nacl.secret.SecretBox(_key(passphrase, content.salt)).decrypt(content.locked)
        identity = Identity(bytes(seed))
    except (nacl.exceptions.CryptoError, ValueError) as error:
        raise ConfigError(f"that passphrase does not open {path}: try again") from error
    addresses = tuple(dict.fromkeys((*more, *content.addresses)))[:ADDRESSES_MAX]
    return Successor(content.run, content.run_id, identity, addresses)


def read_successor(path: Path) -> SuccessorFile:
    """Return what a successor's file says without its passphrase. Raises ConfigError, ResourceError."""
    try:
        return msgspec.json.decode(read_bounded(path, FILE_BYTES_MAX), type=SuccessorFile)
    except OSError as error:
        raise ResourceError(f"{path} cannot be read ({error.strerror}): check the path and its owner") from error
    except MALFORMED as error:
        raise ConfigError(
            f"{path} is no successor's file, which `peer coordinate --make-successor` writes: name that"
        ) from error


def _taken(path: Path) -> ConfigError:
    return ConfigError(f"{path} exists already: name another file, or delete it first")


def _check_passphrase(passphrase: str) -> None:
    if len(passphrase) < PASSPHRASE_MIN:
        raise ConfigError(f"the passphrase needs {PASSPHRASE_MIN} characters or more: only it keeps others out")
    if not passphrase.strip() or len(set(passphrase)) == 1:
        raise ConfigError("the passphrase is blank or one character again and again: use several words")


def _key(passphrase: str, salt: bytes) -> bytes:
    return argon2id.kdf(nacl.secret.SecretBox.KEY_SIZE, passphrase.encode(), salt, _OPS, _MEMORY)


def _printed(home: Home) -> tuple[str, ...]:
    try:
        return Invite.parse(read_bounded(home.invite, FILE_BYTES_MAX).decode()).addresses
    except (OSError, ValueError, ConfigError):
        return ()


# -- taking over -------------------------------------------------------------------------------------------------------


def enter_home(home: Home, successor: Successor) -> None:
    """Put the run's key into a home that holds no other. Raises ConfigError, IdentityError."""
    if successor.identity.saved(home.identity).peer_id != successor.identity.peer_id:
        raise ConfigError(f"{home.path} has a key of its own: choose a new folder with --home")


async def take_over(home: Home, successor: Successor) -> None:
    """Fetch the run into `home`, if it is not there: manifest, tokenizer and the last state of each group, as far as
    members prove and hold it. From then on it is the home of a coordinator that was restored.

    Raises NotAdmitted or DialError if no peer of the run answers, NetworkError if none has its weights, ConfigError for
    a gossip run."""
    if load_run_files(home.path) is not None:
        return
    invite = Invite(successor.run_id, successor.identity.peer_id, successor.addresses)
    async with open_client(invite, home.path) as client:
        manifest = client.training
        if not manifest.outer.has_common_state:
            raise ConfigError("peers of a gossip run continue by themselves: it needs no coordinator")
        place = Place(client.host, home, manifest)
        for stage in range(manifest.stages):
            await _bring(client, place, stage, successor.identity)
            records = RecordFiles(home.stage(stage, manifest.stages).agreement)
            await trio.to_thread.run_sync(records.write, {RESTORED_KEY: b"1"})
        save_run_files(home.path, client.signed, client.tokenizer)  # last: a home without it holds no run


async def _bring(client: RunClient, place: Place, stage: int, owner: Identity) -> None:
    """Fetch the last state of a stage and keep it. If a round ends meanwhile, the next state is tried."""
    failure = NetworkError("no peer of the run proves and holds its weights: start a member, then try again")
    for attempt in range(TRIES):
        if attempt:
            await trio.sleep(PAUSE_S)
        candidates = await client.candidates(await client.members(), stage)
        proven = next((candidate for candidate in candidates if candidate.holders), None)
        if proven is None:
            continue
        try:
            fetched = await fetch_commit(place, stage, proven)
        except NetworkError as error:
            failure = error
            continue
        if not await save_commit(place, stage, proven, fetched, owner):
            raise ResourceError(f"the run's state cannot be written under {place.home.path}: free some space")
        return
    raise failure
