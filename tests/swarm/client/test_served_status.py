"""A client reads the status of a served model; what only a training run has is refused with one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.readings import print_state
from dht.node import NodeConfig, open_node
from peer.errors import ConfigError
from swarm.client.download import download_head
from swarm.client.session import open_client
from swarm.membership.member_record import MEMBERS
from swarm.monitor.collector import MonitorCollector
from swarm.run.gate import Gate
from swarm.run.manifest import sign_manifest
from swarm.run.manifest_transfer import serve_run_files
from tests.swarm.run.test_gate import AUTHORITY, hosts, invite_to
from tests.swarm.run.test_served_model import TOKENIZER, served_model


async def test_a_client_of_a_served_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = served_model()
    async with hosts(1, first=AUTHORITY) as (member,):
        Gate(member.rpc, manifest, AUTHORITY)
        serve_run_files(member.rpc, sign_manifest(AUTHORITY, manifest), TOKENIZER)
        async with open_node(member, NodeConfig(manifest.run_id), [MEMBERS]):
            invite = invite_to(manifest, member.addresses)
            seen = await MonitorCollector(invite).once()
            assert (seen.run_id, seen.name, seen.open) == (manifest.run_id, "a served model", False)
            assert (seen.blocks_total, seen.parts, seen.members) == (4, 2, ())
            async with open_client(invite) as client:
                with pytest.raises(ConfigError, match="is a served model, not a training run"):
                    _ = client.training
                assert (client.manifest, client.tokenizer) == (manifest, TOKENIZER)
                assert await client.members() == {}
                with pytest.raises(ConfigError, match="is a served model, not a training run"):
                    await client.all_candidates({})
            with pytest.raises(ConfigError, match="is a served model, not a training run"):
                await download_head(invite, tmp_path / "state.part")
    print_state(seen, as_json=False)
    shown = capsys.readouterr().out
    assert f"a served model  served model {manifest.run_id[:12]}  by invitation" in shown
    assert "4 blocks in fp32, a checkpoint of 2 parts" in shown and "no server holds blocks 0 to 3" in shown
