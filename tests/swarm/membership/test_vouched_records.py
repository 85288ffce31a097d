"""Records of members in a closed run, between real nodes."""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from dht.node import NodeConfig, open_node
from swarm.membership.member_record import MEMBERS, member_schema
from swarm.run.gate import Gate
from tests.dht.support.local_swarm import BRISK
from tests.swarm.membership.test_bans import record
from tests.swarm.run.test_gate import AUTHORITY, gate_of, hosts, manifest_of


async def test_a_closed_run_keeps_records_of_its_members_only() -> None:
    """The signer alone does not make a member: not for a store, and not for a reader of a store that lies."""
    manifest = manifest_of(open_run=False)
    async with hosts(3, first=AUTHORITY) as (authority, member, other):
        gates = [Gate(authority.rpc, manifest, AUTHORITY), gate_of(member, manifest), gate_of(other, manifest)]
        nodes = []
        async with AsyncExitStack() as stack:
            for host, gate in zip((authority, member, other), gates, strict=True):
                schema = MEMBERS if host is other else member_schema(gate)  # the liar keeps anything
                nodes.append(
                    await stack.enter_async_context(
                        open_node(host, NodeConfig(manifest.run_id, authority.addresses, tuning=BRISK), [schema])
                    )
                )
            honest = msgspec.structs.replace(record("one"), credential=gates[1].chain)
            assert await nodes[1].put(MEMBERS, manifest.run_id, honest, 60.0) >= 2
            stolen = msgspec.structs.replace(record("two"), credential=gates[1].chain)
            for bad in (record("two"), stolen):
                assert await nodes[2].put(MEMBERS, manifest.run_id, bad, 60.0) <= 1  # at most with itself
            assert set(await nodes[0].get(MEMBERS, manifest.run_id)) == {member.peer_id}
