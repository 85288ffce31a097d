"""Records what this release writes, for `test_recorded.py` to read for ever after: a home, its head with the proof, DHT
records, and the manifest of a served model.

    python -m tests.swarm.recorded.record            # writes tests/swarm/recorded/protocol-N

Run it once for each protocol number, when that number is released, and never again: what it has written is what
releases must go on reading. The home is that of a peer of a small run on this machine, which is over: its key and its
invite are of no use to anybody.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import trio

from dht.records import sign_record
from peer.checkpoint.checkpoint_file import load_checkpoint
from peer.config import ModelConfig
from peer.events import EventLog
from peer.identity import Identity
from peer.model.text.rules import TextRules
from peer.net.host import open_host
from swarm.inference.record import SERVERS, ServerRecord, servers_key
from swarm.membership.member_record import MEMBERS, member_record
from swarm.protocol.agreement.proof import ProofChecker
from swarm.protocol.agreement.records import links_in
from swarm.protocol.head import Head
from swarm.protocol.signer import KeySigner
from swarm.rounds.records import RecordFiles
from swarm.rounds.result_log import ResultLog, path_between
from swarm.run.agreement import agreement_config
from swarm.run.home import Home
from swarm.run.manifest import PROTOCOL_VERSION, Manifest, ServedModelManifest, open_manifest, sign_manifest
from swarm.run.manifest_transfer import load_run_files
from tests.support.peer_process import PeerProcess
from tests.swarm.support.swarm_harness import RUN_TOML, open_swarm

OUT: Final = Path(__file__).parent / f"protocol-{PROTOCOL_VERSION}"
SMALL: Final = RUN_TOML.replace("hidden_size = 32", "hidden_size = 8").replace("layers = 2", "layers = 1")
KEPT: Final = (
    "identity.key", "invite", "manifest.msgpack", "guests.msgpack", "listening", "addresses.json", "events.jsonl",
    "agreement", "results", "fetched", "checkpoints",
)  # fmt: skip
AT: Final = 1_700_000_000.0


async def live(folder: Path) -> PeerProcess:
    """Let two peers train, stop and start again; one is then killed: it has a checkpoint, and results since."""
    async with open_swarm(folder, steps=2, run=SMALL) as swarm:
        first, second = swarm.join("first"), swarm.join("second")
        await swarm.committed(2, first, second)
        for peer in (first, second):
            peer.interrupt()
        for peer in (first, second):
            await peer.wait_exit()
        for peer in (first, second):
            swarm.restart(peer)
        since = first.mark()
        await first.until(lambda: sum(fact.name == "round_committed" for fact in first.facts[since:]) >= 3, "commits")
        first.kill()
        return first


def keep(home: Path) -> Home:
    """Copy what is to be kept of a home, with the last of its checkpoints."""
    kept = Home(OUT / "home")
    for name in KEPT:
        source, target = home / name, kept.path / name
        if source.is_dir():
            shutil.copytree(source, target)
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for earlier in sorted(kept.checkpoints.iterdir())[:-1]:
        shutil.rmtree(earlier)
    return kept


def write_head(home: Home, manifest: Manifest, identity: Identity) -> Head:
    """Write the last head in the home's records, and its proof."""
    records = RecordFiles(home.agreement).read()
    head = links_in(records)[-1].link.head
    checker = ProofChecker(agreement_config(manifest, 0, identity.peer_id), KeySigner(identity))
    proof = checker.prove(records, head.hash)
    checker.check(head, proof)
    (OUT / "head.msgpack").write_bytes(msgspec.msgpack.encode(head))
    (OUT / "proof.msgpack").write_bytes(msgspec.msgpack.encode(proof))
    saved = load_checkpoint(next(home.checkpoints.iterdir()))
    assert path_between(ResultLog(home.path / "results").load(), saved.tree.root, head.state_hash), (
        "a state was fetched: again"
    )
    return head


def write_served_manifest(identity: Identity) -> ServedModelManifest:
    manifest = ServedModelManifest(
        protocol=PROTOCOL_VERSION,
        authority=identity.peer_id,
        created_at=int(AT),
        model=ModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=128),
        tokenizer="bytes",
        name="a served model",
        cuts=((0, 1), (1, 2)),
        checkpoint=(b"a" * 32, b"b" * 32),
        dtype="bf16",
        window=64,
        text=TextRules(stops=(3,), chat_template="{{ messages }}"),
    )
    (OUT / "served.msgpack").write_bytes(msgspec.msgpack.encode(sign_manifest(identity, manifest)))
    return manifest


async def write_records(identity: Identity, head: Head, run_id: str, served_id: str) -> None:
    """Write the record of a member and that of a block server."""
    async with open_host(identity=identity, events=EventLog()) as host:
        member = member_record(host, head, session="s", name="first", role="full", phase="compute", joined_at=AT)
    server = ServerRecord(
        session="s", name="first", version="source", addresses=["/ip4/127.0.0.1/tcp/1"], joined_at=AT, at=AT,
        first=0, end=2, pages=8, step_ms=1.5,
    )  # fmt: skip

    issued_us = int(AT * 1e6)
    signed = sign_record(identity, run_id, MEMBERS, run_id, member, ttl_s=9.0, issued_us=issued_us)
    (OUT / "member.msgpack").write_bytes(msgspec.msgpack.encode(signed))
    signed = sign_record(identity, served_id, SERVERS, servers_key(served_id), server, ttl_s=9.0, issued_us=issued_us)
    (OUT / "server.msgpack").write_bytes(msgspec.msgpack.encode(signed))


async def record() -> None:
    with tempfile.TemporaryDirectory() as folder:
        peer = await live(Path(folder))
        home = keep(peer.home)
    run_files = load_run_files(home.path)
    assert run_files is not None
    manifest, identity = open_manifest(run_files[0]), Identity.load_or_create(home.identity)
    head = write_head(home, manifest, identity)
    served = write_served_manifest(identity)
    await write_records(identity, head, manifest.run_id, served.run_id)
    (checkpoint,) = home.checkpoints.iterdir()
    facts = {
        "peer": identity.peer_id,
        "run_id": manifest.run_id,
        "served_id": served.run_id,
        "head": head.hash.hex(),
        "round": head.round,
        "state_hash": head.state_hash.hex(),
        "checkpoint_round": load_checkpoint(checkpoint).round,
        "events": sorted({json.loads(line)["event"] for line in home.events.read_text().splitlines()}),
    }
    (OUT / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    if OUT.exists():
        sys.exit(f"{OUT} exists: what a release has written is recorded once")
    trio.run(record)
