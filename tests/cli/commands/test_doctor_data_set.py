"""`peer doctor` on a data set of pages: it reads some pages of a folder, and says what pages of others take."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cli.checks.data_set import fetched_finding, folder_finding, is_data_set, sampled
from cli.checks.machine import Finding
from cli.checks.network import text_findings
from peer.config import DataConfig
from peer.data.pages.folder import BuiltPages
from peer.data.pages.index import PageIndex
from peer.identity import Identity
from peer.ipc.corpus_messages import OwnText
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest
from swarm.run.peer_context import JoinConfig
from tests.peer.data.pages.data_sets import write_data_set
from tests.swarm.run.test_manifest import make_manifest

SEQ_LEN = 1023  # 2048 windows a page
AUTHORITY = Identity.generate().peer_id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data_set(tmp_path / "data", seq_len=SEQ_LEN, windows=5 * 2048)
    return tmp_path / "data"


def manifest_of(index: PageIndex, **changes: object) -> Manifest:
    manifest = make_manifest(AUTHORITY)
    model = msgspec.structs.replace(manifest.model, vocab_size=256, max_seq_len=SEQ_LEN)
    data = DataConfig(seq_len=SEQ_LEN, source="pages", pages=index.config)
    return msgspec.structs.replace(manifest, **{"model": model, "data": data, "requires": ("pages",), **changes})


def test_a_folder_is_described_with_a_run_and_without(folder: Path, tmp_path: Path) -> None:
    index = BuiltPages.open(folder).index
    for manifest in (None, manifest_of(index)):
        found = folder_finding(folder, manifest)
        assert found.state == "ok" and index.config.root[:16] in found.detail
        assert (
            "10,485,760 tokens to train on, 4,096 held out" in found.detail and "the 6 pages that were" in found.detail
        )
    assert is_data_set(str(folder)) and not is_data_set(str(tmp_path)) and not is_data_set("")


def test_the_first_and_the_last_page_are_always_read(folder: Path) -> None:
    index = BuiltPages.open(folder).index
    hashes = bytes(32 * 100)
    large = msgspec.structs.replace(index, train=msgspec.structs.replace(index.train, windows=204_800, hashes=hashes))
    pages = sampled(large)
    assert len(pages) == 10 and pages[0] == 0 and pages[-1] == 100


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "train-00000.pages").write_bytes(b"\1" * 20_971_520), "its hash is another"),
        (lambda folder: (folder / "train-00000.pages").write_bytes(b""), "has 0 bytes instead of 20971520"),
        (lambda folder: (folder / "held-out-00000.pages").unlink(), "is missing"),
        (lambda folder: (folder / "index.msgpack").write_bytes(b"x"), "is no index of pages"),
    ],
)
def test_damage_is_told_with_a_remedy(folder: Path, spoil: Callable[[Path], object], says: str) -> None:
    spoil(folder)
    found = folder_finding(folder)
    assert (found.state, found.exit_code) == ("failure", 2) and says in found.detail + found.remedy and found.remedy


def test_another_data_set_than_the_runs_is_refused(folder: Path, tmp_path: Path) -> None:
    other, _, _ = write_data_set(tmp_path / "other", seq_len=SEQ_LEN, windows=10, seed=9)
    found = folder_finding(folder, manifest_of(other))
    assert found.state == "failure" and f"another data set than the run's, {other.config.root[:16]}" in found.detail
    of_text = folder_finding(folder, make_manifest(AUTHORITY))
    assert of_text.state == "failure" and "each machine's own text" in of_text.detail


async def findings(manifest: Manifest, home: Path, data: str) -> list[Finding]:
    invite = Invite(manifest.run_id, AUTHORITY, (f"/ip4/127.0.0.1/tcp/1/p2p/{AUTHORITY}",))
    config = JoinConfig(home, invite, text=OwnText(data))
    return [found async for found in text_findings(manifest, config, b"")]


async def test_nothing_is_missing_where_pages_come_from_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = BuiltPages.open(folder).index
    manifest = manifest_of(index)
    (found,) = await findings(manifest, tmp_path / "home", "")
    assert found.state == "ok" and "no text is needed here" in found.detail
    assert "a cache of at most 67.1 MB" in found.detail and "21.0 MB in all" in found.detail
    (named,) = await findings(manifest, tmp_path / "home", str(folder))
    assert named.state == "ok" and "pages that were read are intact" in named.detail
    (text,) = await findings(manifest, tmp_path / "home", str(tmp_path))
    assert text.state == "failure" and "peer data build" in text.remedy
    assert await findings(make_manifest(AUTHORITY), tmp_path / "home", "") == []
    full = type("Full", (), {"free": 1 << 20})
    monkeypatch.setattr(shutil, "disk_usage", lambda place: full)
    (short,) = await findings(manifest, tmp_path / "home", "")
    assert short.state == "warning" and "where 1.0 MB are free" in short.detail and "free space" in short.remedy


def test_a_run_of_text_has_no_cache(tmp_path: Path) -> None:
    assert fetched_finding(make_manifest(AUTHORITY), tmp_path) is None
