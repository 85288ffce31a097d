"""What the agreement of one group sends, signs and writes in a round, by the number of members.

    python benchmarks/agreement/traffic.py [--members 4] [--rounds 10] [--json [FILE]]

Nodes of the real core (`swarm/protocol/agreement`) in virtual time, without faults: 20 s a round, 4 slices, 10 ms a
message. Names, sessions and signatures are as long as real ones. Bytes are those of the messages as msgpack, without
the headers of calls and connections, and without the slices themselves. The first round is not counted, in which the
group begins. A signature counts as checked where `KeySigner` would check it: once at each node.

`limit`: the bytes if each member received each other one's contribution once, and nothing else were sent.
"""

from __future__ import annotations

import argparse
import base64
import gc
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from blake3 import blake3

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.agreement import traffic_rows  # noqa: E402
from benchmarks.common.options import add_json, write_results  # noqa: E402
from peer.identity import Signed  # noqa: E402
from swarm.protocol.agreement import actions  # noqa: E402
from swarm.protocol.agreement.output import encode  # noqa: E402
from swarm.protocol.agreement.packing import unpacked  # noqa: E402
from swarm.protocol.agreement.signing import Signer  # noqa: E402
from swarm.protocol.plan import CONTRIBUTION_KIND, WorkPlan  # noqa: E402
from tests.swarm.protocol.agreement.group import (  # noqa: E402
    COORDINATOR,
    SLICES,
    WORK,
    GroupOfNodes,
    Machine,
    SignatureTable,
    contribution_body,
)

ROUNDS: Final = {4: 10, 16: 10, 64: 10, 256: 4}  # by members; one of 256 takes a minute or more
ROUND_S: Final = 20.0
BEYOND_S: Final = 0.35  # of a round, besides training
Body = TypeVar("Body", bound=msgspec.Struct)


class CountedTable(SignatureTable):
    """Signatures as long as real ones. Counts who signs, and who checks what for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.checked = Counter[str](), Counter[str]()
        self.contribution_bytes = 0
        self.bodies: dict[tuple[str, str, bytes], Any] = {}

    def of(self, peer: str) -> Signer:  # type: ignore[override]
        return CountedSigner(self, peer)


class CountedSigner:
    """Signs by an entry in the table."""

    def __init__(self, table: CountedTable, peer: str) -> None:
        self._table, self._peer = table, peer
        self._known: set[tuple[str, str, bytes]] = set()

    def sign(self, kind: str, body: msgspec.Struct) -> Signed:
        body_bytes = encode(body)
        signed = Signed(body_bytes, self._peer, blake3(self._peer.encode() + body_bytes).digest(64))
        entry = (self._peer, kind, signed.body)
        self._table.made[self._peer] += 1
        self._table.bodies[entry] = body
        self._known.add(entry)
        if kind == CONTRIBUTION_KIND:
            self._table.contribution_bytes += len(msgspec.msgpack.encode(signed))
        return signed

    def open(self, signed: Signed, kind: str, type_: type[Body]) -> Body:
        entry = (signed.signer, kind, signed.body)
        if entry not in self._known:
            self._table.checked[self._peer] += 1
            self._known.add(entry)
        return self._table.bodies[entry]  # type: ignore[no-any-return]


class CountedGroup(GroupOfNodes):
    """Counts what its nodes send and write, but for what they send to themselves."""

    table: CountedTable
    table_type = CountedTable
    session_of = staticmethod(lambda peer, life: blake3(f"{peer}{life}".encode()).hexdigest()[:16])

    def __init__(self, members: int, slices: int = SLICES) -> None:
        self.bytes_by_kind, self.bytes_by_sender = Counter[str](), Counter[str]()
        self.largest: dict[str, int] = {}
        """The bytes of the largest message of each kind."""
        self.merged = 0
        """The contributions in the last round's roster."""
        self.messages = self.records = 0
        peers = [base64.b32encode(blake3(bytes([i])).digest()).decode()[:52] for i in range(members)]
        work = replace(WORK, slices=lambda head: slices)
        super().__init__(peers, train_s=ROUND_S - BEYOND_S, work=work)

    def _do(self, machine: Machine, action: actions.Action) -> None:
        if isinstance(action, actions.Send):
            size = len(msgspec.msgpack.encode(action.message))
            self.messages += 1
            kind = str(type(unpacked(action.message)).__struct_config__.tag)
            self.bytes_by_kind[kind] += size
            self.largest[kind] = max(size, self.largest.get(kind, 0))
            self.bytes_by_sender[machine.peer] += size
        elif isinstance(action, actions.Persist):
            self.records += 1
        elif isinstance(action, actions.MergeSlices):
            self.merged = len(action.roster.merged)
        super()._do(machine, action)
        self.sent.clear()  # some gigabytes

    def contribution(self, machine: Machine, plan: WorkPlan) -> Signed:
        """Return what the machine has computed: its norms have as many digits as real ones."""
        body = contribution_body(machine.node.me, plan, slices=self.work.slices(machine.node.head))
        norms = tuple(int.from_bytes(name[:7], "big") / 2**56 for name in body.hashes)
        body = msgspec.structs.replace(body, loss=sum(norms), sqnorms=norms)
        return self.table.of(machine.peer).sign(CONTRIBUTION_KIND, body)

    def forget(self) -> None:
        """Begin to count anew."""
        self.bytes_by_kind.clear()
        self.bytes_by_sender.clear()
        self.messages = self.records = self.table.contribution_bytes = 0
        self.table.made.clear()
        self.table.checked.clear()


def measure(members: int, rounds: int) -> dict[str, Any]:
    """Run a group of so many for one round and `rounds` more, and return what these cost."""
    group = CountedGroup(members)
    group.run_to(1)
    group.forget()
    began, seconds, busiest, before = time.monotonic(), group.now, list[int](), Counter[str]()
    for round in range(2, rounds + 2):
        group.run_to(round)
        busiest.append(max((group.bytes_by_sender - before).values()))
        before = group.bytes_by_sender.copy()
    a_round = 1 / rounds
    nodes = [peer for peer in group.machines if peer != COORDINATOR]
    return {
        "members": members,
        "rounds": rounds,
        "round_s": round_to(a_round * (group.now - seconds)),
        "messages": round_to(a_round * group.messages),
        "bytes": round_to(a_round * group.bytes_by_sender.total()),
        "limit_bytes": round_to(a_round * group.table.contribution_bytes * (members - 1)),
        "busiest_bytes": round_to(a_round * sum(busiest)),
        "signed_a_node": round_to(a_round * sum(group.table.made[peer] for peer in nodes) / members),
        "checked_a_node": round_to(a_round * sum(group.table.checked[peer] for peer in nodes) / members),
        "records_a_node": round_to(a_round * group.records / len(group.machines)),
        "kinds": {kind: round_to(a_round * size) for kind, size in group.bytes_by_kind.most_common()},
        "took_s": round_to(time.monotonic() - began),
    }


def round_to(value: float) -> float:
    """Return a figure as it is written down."""
    return round(value, 1) if value < 1000 else round(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, action="append", help=f"groups of so many (default {tuple(ROUNDS)})")
    parser.add_argument("--rounds", type=int, help=f"counted (default {ROUNDS})")
    add_json(parser, "agreement/traffic")
    options = parser.parse_args()
    gc.set_threshold(50_000)  # what is kept has few cycles
    groups: list[dict[str, Any]] = []
    for members in options.members or ROUNDS:
        groups.append(measure(members, options.rounds or ROUNDS.get(members, 10)))
        print(f"{members} members took {groups[-1]['took_s']} s; {traffic_rows.kinds(groups[-1])}", flush=True)
        if options.json:
            write_results(options.json, groups)
    lines = [list(traffic_rows.HEAD), *traffic_rows.rows(groups)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(traffic_rows.HEAD))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
