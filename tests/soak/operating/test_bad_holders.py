"""A run on pages among whose holders one lies, one falls silent and one leaves, each as it is asked for a page."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from shutil import rmtree

import pytest

from peer.data.pages.cache import CachedPages
from peer.data.pages.folder import BuiltPages, read_page
from tests.peer.data.pages.data_sets import write_data_set
from tests.support.peer_process import PeerProcess
from tests.swarm.pages.test_training_on_pages import OF_PAGES, SEQ_LEN
from tests.swarm.support.swarm_harness import Swarm, open_swarm

pytestmark = [pytest.mark.process, pytest.mark.soak]
PAGES = 24
FAULTS = {"liar": "garble", "mute": "stop", "leaver": "kill"}
VISITS_MAX = 30
ROUNDS = 5  # after the last of the faults


def all_have_failed(swarm: Swarm) -> bool:
    """Whether the mute one is frozen, the one that leaves has ended, and somebody found the lie."""
    found = any(peer.all("peer_penalized") for peer in swarm.peers.values())
    return found and swarm.peers["mute"].is_stopped and not swarm.peers["leaver"].alive


async def has_pages(peer: PeerProcess, since: int = 0) -> None:
    await peer.wait_for("pages_kept", lambda fields: fields["pages"] > 1, since)


async def test_no_bad_page_is_used_and_no_round_is_lost(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_data_set(data, seq_len=SEQ_LEN, windows=PAGES * 2048 - 100)
    built = BuiltPages.open(data)
    async with open_swarm(tmp_path, run=OF_PAGES, outer="[outer]\nsteps = 4", min_peers=3, data=data) as swarm:
        honest = [swarm.join(f"p{number}") for number in range(3)]
        await swarm.committed(2, *honest)
        faulty = [swarm.join(name, fault=f"{fault}:answer/pages.chunk:0") for name, fault in FAULTS.items()]
        for peer in faulty:
            await has_pages(peer)
        newcomer = swarm.join("newcomer")
        await has_pages(newcomer)
        for _ in range(VISITS_MAX):  # each time it asks holders that are drawn at random
            if all_have_failed(swarm):
                break
            newcomer.interrupt()
            await newcomer.wait_exit()
            rmtree(newcomer.home / "pages")
            since = newcomer.mark()
            swarm.restart(newcomer)
            await has_pages(newcomer, since)
        assert all_have_failed(swarm), "no peer asked the faulty holders"
        await swarm.committed(max(peer.round for peer in honest) + ROUNDS, *honest)
        for peer in honest:
            assert not peer.all("page_missing") and not peer.all("round_discarded"), peer.transcript()
            rounds = [int(fact.fields["round"]) for fact in peer.all("round_committed")]
            assert all(after == before + 1 for before, after in pairwise(rounds)), rounds
            pages = CachedPages(peer.home / "pages")
            for page in range(built.index.pages):
                if place := pages.find(page):
                    assert read_page(built.index, page, place) == read_page(built.index, page, built.find(page))
        swarm.check_agreement()
