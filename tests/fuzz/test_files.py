"""Mutated files: each reader takes them or raises one of our errors, in one sentence."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from cli.progress.event_tail import EventTail
from peer.checkpoint.checkpoint_file import MANIFEST, describe, load_checkpoint, write_checkpoint
from peer.checkpoint.generation import StateGeneration
from peer.checkpoint.hash_tree import hash_state
from peer.checkpoint.mapped_floats import map_floats
from peer.config import ModelConfig
from peer.data.pages.cache import PageCache
from peer.data.pages.folder import load_index
from peer.data.pages.index import encode_index, read_index
from peer.errors import BarnraiseError, ConfigError
from peer.identity import Identity, Signed, sign_body
from peer.model.layout import FlatLayout
from peer.net.address_book import AddressBook
from swarm.coordinator.regroup_files import GroupOutcome, RegroupAnswer, RegroupRequest, read_file
from swarm.membership.bans import extend_bans
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.events import Started
from swarm.protocol.agreement.messages import AcceptedValue, ChainLink, StartBody
from swarm.protocol.agreement.node import AgreementNode
from swarm.protocol.agreement.records import BallotRecord, LinkRecord
from swarm.protocol.agreement.rules.acceptor import Ballot
from swarm.protocol.agreement.rules.evidence import START
from swarm.protocol.head import Member
from swarm.protocol.signer import KeySigner
from swarm.rounds.records import LOG_NAME, RecordFiles
from swarm.rounds.result_log import LoggedResult, ResultLog
from swarm.run.ban_list import BanList, sign_bans
from swarm.run.config import read_run_config
from swarm.run.guests import GuestBook
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.inviting import make_invite
from swarm.run.manifest import sign_manifest
from swarm.run.manifest_transfer import load_run_files
from swarm.state.partial_file import PartFile
from swarm.training.checkpoints import last_stage, proof_of
from tests.fuzz.support.guard import MUTATIONS, Trial, chance_for, no_growth
from tests.fuzz.support.mutations import of_bytes, of_json, of_msgpack
from tests.fuzz.support.resign import resigned_bytes
from tests.peer.data.pages.data_sets import write_data_set
from tests.swarm.run.test_invite import opened, sealed
from tests.swarm.run.test_manifest import make_manifest
from tests.swarm.support.stage_commits import begun

OWNER = Identity(bytes(32))
GUEST = Identity(b"\1" * 32)
RUN = make_manifest(OWNER.peer_id)
HEAD = RUN.first_head()
BEGUN = begun(HEAD, Member(GUEST.peer_id, "s"))
SIGNED_START = sign_body(OWNER, START, StartBody(BEGUN))
PROOF = (ChainLink(BEGUN, start=SIGNED_START),)
MODEL = ModelConfig(hidden_size=8, layers=1, heads=2, kv_heads=1, intermediate_size=8, max_seq_len=16, vocab_size=16)
LAYOUT = FlatLayout.of(MODEL)
STATE = {"theta": torch.arange(LAYOUT.numel, dtype=torch.float32)}
TEMPLATE = Path(__file__).parents[2] / "cli" / "templates" / "run.toml"

BALLOT = BallotRecord(
    BEGUN.hash, Ballot(promised=2, voted_attempt=1, voted=b"v"), AcceptedValue(1, BEGUN, SIGNED_START), None
)
RECORDS = {
    "identity": b"s",
    "ballot": msgspec.msgpack.encode(BALLOT),
    "link/0": msgspec.msgpack.encode(LinkRecord(0, PROOF[0], True)),
}
"""What a member, or the coordinator, keeps of the agreement."""

Change = Callable[[random.Random, bytes, bytes], bytes]


@dataclass(frozen=True)
class Format:
    """A file of a peer's home: its valid content, how it is mutated, and how it is read."""

    name: str
    valid: bytes
    change: Change
    load: Callable[[Path], object]


def body_of(kind: str, signer: Identity = OWNER) -> Change:
    """Mutate a signed file: the body, signed by its rightful signer again, or the whole file."""

    def change(chance: random.Random, data: bytes, other: bytes) -> bytes:
        if chance.random() < 0.3:
            return of_msgpack(chance, data, other)
        signed = msgspec.msgpack.decode(data, type=Signed)
        return resigned_bytes(signer, kind, of_msgpack(chance, signed.body, signed.body))

    return change


def of_invite(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Mutate the text, or the content under a right checksum."""
    if chance.random() < 0.3:
        return of_bytes(chance, data, other)
    return sealed(of_bytes(chance, *(opened(text.decode()) for text in (data, other)))).encode()


def of_lines(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Mutate one line."""
    lines = data.splitlines(keepends=True)
    at = chance.randrange(len(lines))
    lines[at] = of_json(chance, lines[at].rstrip(b"\n"), chance.choice(lines)) + b"\n"
    return b"".join(lines)


def invite() -> bytes:
    address = f"/ip4/127.0.0.1/tcp/4001/p2p/{OWNER.peer_id}"
    return str(make_invite(OWNER, (), RUN, (address,), guests=3, days=3)).encode()


def read_invite(path: Path) -> None:
    found = Invite.parse(path.read_bytes().decode(errors="replace"))
    assert Invite.parse(str(found)) == found


def events() -> bytes:
    said: list[dict[str, object]] = [
        {"at": 1.5, "event": "round_committed", "round": 3, "members": 2, "loss": 2.5, "seconds": 1.0},
        {"at": 2, "event": "peer_suspect", "peer": GUEST.peer_id},
        {"at": 3.0, "event": "stage_load", "stage": 1, "peers": ["a", "b"], "counts": {"a": 1}},
    ]
    return b"".join(msgspec.json.encode(event) + b"\n" for event in said)


def read_events(path: Path) -> None:
    for at, name, fields in EventTail(path).poll():
        assert isinstance(at, float) and isinstance(name, str) and isinstance(fields, dict)


def read_key(path: Path) -> None:
    path.chmod(0o600)
    Identity.load_or_create(path)


def read_proof(path: Path) -> None:
    host = SimpleNamespace(identity=GUEST, peer_id=GUEST.peer_id)
    context = SimpleNamespace(manifest=RUN, home=Home(path.parent), host=host)
    proof = proof_of(context, 0, BEGUN)  # type: ignore[arg-type]
    assert proof is None or proof[-1].head == BEGUN


def read_record(path: Path) -> None:
    """Start a member, and the coordinator, on a record among whole ones."""
    start_on({**RECORDS, path.name.removesuffix(".record").replace("-", "/"): path.read_bytes()})


def read_log(path: Path) -> None:
    start_on(RecordFiles(path.parent).read())


def log_file() -> bytes:
    with TemporaryDirectory() as folder:
        RecordFiles(Path(folder)).write(RECORDS)
        return (Path(folder) / LOG_NAME).read_bytes()


def start_on(records: dict[str, bytes]) -> None:
    for peer in (GUEST, OWNER):
        config = AgreementConfig(genesis=HEAD, peer=peer.peer_id, coordinator=OWNER.peer_id)
        work: Any = None  # is asked for nothing before there is a message
        node = AgreementNode(config, KeySigner(peer), work)
        assert node.step(0.0, Started(records, (HEAD.state_hash,), "session", bytes(32), False))


def read_results(path: Path) -> None:
    for result in ResultLog(path.parent).load().values():
        assert sum(len(part) for part in result.parts) <= path.stat().st_size


def result_file() -> bytes:
    with TemporaryDirectory() as folder:
        log = ResultLog(Path(folder))
        log.write(LoggedResult(BEGUN, bytes(32), [memoryview(b"slice"), memoryview(b"s")]), b"name")
        return next(Path(folder).glob("*.result")).read_bytes()


def read_part(path: Path) -> None:
    tree = hash_state(list(STATE.values()))
    file = PartFile(path, tree.size_bytes)
    try:
        file.intact(tree)
        map_floats(path, tree.size_bytes)
    finally:
        file.close()


def data_set() -> tuple[bytes, bytes]:
    """Return the index of a small data set, and its first page."""
    with TemporaryDirectory() as folder:
        index, _, _ = write_data_set(Path(folder), seq_len=7, windows=9)
        return encode_index(index), (Path(folder) / "train-00000.pages").read_bytes()


def read_page_index(path: Path) -> None:
    """Read an index alone, and as that of a run."""
    wanted = read_index(data_set()[0], "its own").config
    index = load_index(path)
    assert index.size_bytes > 0 and index.rows(0) and index.rows(index.pages - 1)
    assert encode_index(index) == path.read_bytes()
    with suppress(ConfigError):
        assert load_index(path, wanted).config == wanted


def read_cached_page(path: Path) -> None:
    """Use a page that an earlier process has left: whole, or not at all."""
    index = read_index(data_set()[0], "its own")
    cache = PageCache(path.parent, index, 1 << 30)
    cache.open()
    if cache.use(0):
        assert path.read_bytes() == data_set()[1]
    else:
        assert 0 not in cache.held and not path.exists()


def formats() -> dict[str, Format]:
    """Return every file of a home but checkpoints and tokens."""
    encode = msgspec.msgpack.encode
    guests = {OWNER.public_key: {GUEST.public_key: ("192.0.2.0/24", 9.5)}}
    book = msgspec.json.encode({"addresses": {OWNER.peer_id: ["/ip4/127.0.0.1/tcp/1", "/dns4/a.example/tcp/2"]}})
    signed = encode(sign_manifest(OWNER, RUN))
    asked = msgspec.json.encode(RegroupRequest("n", (GUEST.peer_id,), (OWNER.peer_id,), True))
    answered = msgspec.json.encode(RegroupAnswer("n", (GroupOutcome("failed", 1, 3, reason="no peer answers"),)))
    bans = encode(sign_bans(OWNER, BanList(RUN.run_id, 1, frozenset({GUEST.peer_id}))))
    found = [
        Format("identity.key", bytes(range(32)), of_bytes, read_key),
        Format("invite", invite(), of_invite, read_invite),
        Format(
            "manifest.msgpack",
            signed,
            body_of("manifest"),
            lambda p: load_run_files(p.parent),
        ),
        Format("regroup.request", asked, of_json, lambda path: read_file(path, RegroupRequest)),
        Format("regroup.answer", answered, of_json, lambda path: read_file(path, RegroupAnswer)),
        Format("proof.msgpack", encode(PROOF), of_msgpack, read_proof),
        Format("addresses.json", book, of_json, lambda path: AddressBook().load(path)),
        Format("events.jsonl", events(), of_lines, read_events),
        Format("bans.msgpack", bans, body_of("bans"), lambda path: extend_bans(path, OWNER, RUN, frozenset())),
        Format("guests.msgpack", encode(guests), of_msgpack, GuestBook),
        Format("replica", b"3", of_bytes, lambda path: last_stage(SimpleNamespace(home=Home(path.parent)))),  # type: ignore[arg-type]
        *(Format(f"{key.replace('/', '-')}.record", whole, of_msgpack, read_record) for key, whole in RECORDS.items()),
        Format(LOG_NAME, log_file(), of_bytes, read_log),
        Format("0.result", result_file(), of_bytes, read_results),
        Format("state.part", STATE["theta"].numpy().tobytes(), of_bytes, read_part),
        Format("pages.index", data_set()[0], of_msgpack, read_page_index),
        Format("0.page", data_set()[1], of_bytes, read_cached_page),
        Format("RUN.toml", TEMPLATE.read_bytes(), of_bytes, read_run_config),
    ]
    return {file.name: file for file in found}


@pytest.mark.parametrize("count", MUTATIONS)
@pytest.mark.parametrize("name", sorted(formats()))
def test_files_of_a_home(name: str, count: int, tmp_path: Path) -> None:
    file, chance, trial = formats()[name], chance_for(name), Trial(name, (BarnraiseError,))
    path = tmp_path / name
    path.write_bytes(file.valid)
    file.load(path)

    def work(data: bytes) -> None:
        path.write_bytes(data)
        file.load(path)

    with no_growth():
        for number in range(count):
            trial.run(number, file.change(chance, file.valid, file.valid), work)


@pytest.mark.parametrize("count", MUTATIONS)
def test_checkpoints(count: int, tmp_path: Path) -> None:
    folder, chance, trial = tmp_path / "checkpoint", chance_for("checkpoints"), Trial("checkpoints", (BarnraiseError,))
    manifest = describe("run", 3, msgspec.msgpack.encode(HEAD), StateGeneration(STATE), LAYOUT)
    write_checkpoint(folder, OWNER, manifest, StateGeneration(STATE))
    load_checkpoint(folder)
    shard = next(folder.glob("*.safetensors"))
    described, weights = (folder / MANIFEST).read_bytes(), shard.read_bytes()
    change = body_of("checkpoint")
    with no_growth():
        for number in range(count):
            path, valid = (folder / MANIFEST, described) if chance.random() < 0.6 else (shard, weights)
            data = change(chance, valid, valid) if path.name == MANIFEST else of_bytes(chance, valid, valid)

            def work(data: bytes, path: Path = path) -> None:
                path.write_bytes(data)
                assert torch.isfinite(load_checkpoint(folder).theta).all()

            trial.run(number, data, work)
            path.write_bytes(valid)
    assert trial.refused
