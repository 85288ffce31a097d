"""Real peers that have no text train on a data set whose pages they fetch from the coordinator and from each other."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from peer.data.first_samples import FIRST_SAMPLES, hash_of, parse_ranges
from peer.data.pages.cache import CachedPages
from peer.data.pages.corpus import PagedCorpus, place_of
from peer.data.pages.folder import BuiltPages
from swarm.monitor.collector import MonitorCollector
from swarm.run.invite import Invite
from tests.peer.data.pages.data_sets import write_data_set
from tests.support.peer_process import PeerProcess
from tests.swarm.support.swarm_harness import WITNESS, open_swarm

pytestmark = pytest.mark.process
SEQ_LEN = 1023  # 2048 windows a page
PAGES = 5
OF_PAGES = WITNESS.replace('"folder"', '"pages"').replace("seq_len = 64", f"seq_len = {SEQ_LEN}").replace(
    "max_seq_len = 128", f"max_seq_len = {SEQ_LEN}"
)  # fmt: skip
TWO_STAGES = (
    OF_PAGES.replace('coordinator = "witness"', "")
    .replace(f"max_seq_len = {SEQ_LEN}", f"max_seq_len = {SEQ_LEN}\ntie_embeddings = false")
    .replace("{outer}", "{outer}\n[pipeline]\nstages = 2\n")
)


def has_second_holders(peer: PeerProcess) -> bool:
    """Whether each range of pages has two holders, as the peer read last."""
    told = peer.all("pages_kept")
    return bool(told) and told[-1].fields["rare"] == 0


async def test_peers_without_text_go_on_when_the_coordinator_with_all_pages_is_killed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_data_set(data, seq_len=SEQ_LEN, windows=PAGES * 2048 - 100)
    built = BuiltPages.open(data)
    whole = PagedCorpus(built.index, built.index.config.root, [built])
    async with open_swarm(tmp_path, run=OF_PAGES, outer="[outer]\nsteps = 4", min_peers=3, data=data) as swarm:
        peers = [swarm.join(f"p{number}") for number in range(3)]
        await swarm.committed(2, *peers)
        for peer in peers:
            await peer.until(partial(has_second_holders, peer), "second holder of each page")
        seen = (await MonitorCollector(Invite.parse(swarm.invite.read_text())).once()).data_set
        assert seen is not None and (seen.root, seen.pages) == (built.index.config.root, built.index.pages)
        assert len(seen.members) == 4 and (seen.rare, seen.missing) == (0, ()) and seen.epochs > 0
        swarm.coordinator.kill()
        await swarm.committed(max(peer.round for peer in peers) + 3, *peers)
        for peer in peers:
            assert not peer.all("page_missing"), peer.transcript()
            pages = CachedPages(peer.home / "pages")
            held = [page for page in range(built.index.pages) if pages.find(page)]
            own = [number for number in range(1000) if place_of(built.index, number, 0)[0] in held]
            cached = PagedCorpus(built.index, built.index.config.root, [pages])
            assert own and (cached.batch(own, 0) == whole.batch(own, 0)).all()


async def test_each_machine_serves_the_first_stage_of_a_pipeline_and_feeders_have_pages(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_data_set(data, seq_len=SEQ_LEN, windows=PAGES * 2048 - 100)
    async with open_swarm(tmp_path, run=TWO_STAGES, outer="[outer]\nsteps = 2", data=data) as swarm:
        feeder = swarm.join("feeder", "--role", "feeder")
        peers = [swarm.join(f"p{number}") for number in range(2)]
        await swarm.committed(2, *peers)
        fed = await feeder.wait_for("text_fed", lambda fields: fields["micro_batches"] > 0)
        assert fed.fields["peers"]
        first = next(peer for peer in peers if peer.all("corpus_read"))
        await first.wait_for("val_evaluated")
        assert not [fact for peer in peers for fact in (*peer.all("text_missing"), *peer.all("page_missing"))]


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.soak), 2])
async def test_a_run_trains_on_the_answers_of_conversations(tmp_path: Path, stages: int) -> None:
    """Of random ids nothing can be learned but that those which count are below 16: the loss says if others do."""
    data = tmp_path / "data"
    small = (TWO_STAGES if stages == 2 else OF_PAGES).replace(str(SEQ_LEN), "63").replace("lr = 4e-3", "lr = 2e-2")
    write_data_set(data, seq_len=63, windows=4000, counting=0.25)
    async with open_swarm(tmp_path, run=small, outer="[outer]\nsteps = 20", data=data) as swarm:
        peers = [swarm.join(f"p{number}") for number in range(2)]
        await swarm.committed(3, *peers)
        losses = [fact.fields["loss"] for peer in peers for fact in peer.commits if fact.fields["loss"]]
        assert min(losses) < math.log(16) + 0.5 < max(losses), losses


@pytest.mark.soak  # a thousand samples of a thousand tokens each
async def test_the_first_samples_of_each_peer_are_those_of_their_numbers(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_data_set(data, seq_len=SEQ_LEN, windows=PAGES * 2048 - 100)
    built = BuiltPages.open(data)
    whole = PagedCorpus(built.index, built.index.config.root, [built])
    async with open_swarm(tmp_path, run=OF_PAGES, outer="[outer]\nsteps = 60", min_peers=3, data=data) as swarm:
        peers = [swarm.join(f"p{number}") for number in range(3)]
        for peer in peers:
            told = (await peer.wait_for("samples_hashed")).fields
            numbers = parse_ranges(told["samples"])
            assert len(numbers) == FIRST_SAMPLES and told["hash"] == hash_of(whole, numbers, 0)
