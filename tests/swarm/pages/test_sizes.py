"""The sizes of a data set by a manifest are those of its index, and a plan counts what a run takes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from peer.config import DataConfig
from peer.data.pages.index import PageIndex
from swarm.pages.sizes import CACHE_BYTES_MIN, DISK_SHARE, DataSetSizes, cache_bytes, plan_data_set
from tests.peer.data.pages.data_sets import write_data_set

SEQ_LEN = 1023  # 2048 windows a page


def data_of(index: PageIndex) -> DataConfig:
    return DataConfig(seq_len=index.seq_len, source="pages", pages=index.config)


def test_a_manifest_tells_what_the_index_does(tmp_path: Path) -> None:
    for vocab_size in (256, 1 << 16, (1 << 16) + 1):
        index, train, held_out = write_data_set(
            tmp_path / str(vocab_size), seq_len=SEQ_LEN, windows=3000, vocab_size=vocab_size
        )
        sizes = DataSetSizes.of(data_of(index))
        assert sizes is not None
        assert (sizes.tokens, sizes.held_out_tokens, sizes.windows) == (train.size, held_out.size, 3000)
        assert (sizes.row_bytes, sizes.size_bytes, sizes.pages) == (index.row_bytes, index.size_bytes, index.pages)
        assert sizes.root == index.config.root
    assert DataSetSizes.of(DataConfig(seq_len=8)) is None


def test_a_plan_counts_epochs_what_is_left_and_what_a_peer_fetches(tmp_path: Path) -> None:
    index, _, _ = write_data_set(tmp_path / "data", seq_len=SEQ_LEN, windows=8000)
    sizes = DataSetSizes.of(data_of(index))
    assert sizes is not None
    plan = plan_data_set(sizes, samples=800, trainers=20, rounds=25, home=tmp_path, trained=8000 + 500)
    assert (plan.epochs, plan.rounds_an_epoch, plan.tokens_left) == (2.5, 10.0, 7500 * (SEQ_LEN + 1))
    assert plan.round_bytes == 40 * 20 * index.row_bytes  # all of a round lies in one page, which each peer fetches
    large = plan_data_set(sizes, samples=80_000, trainers=20, rounds=0, home=tmp_path)
    assert (large.epochs, large.tokens_left) == (None, None)
    assert large.round_bytes == 4000 * index.row_bytes + (4 << 20)  # and the rest of a page that others share


def test_the_cache_takes_what_is_said_or_a_tenth_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        free = 10e9

    looked_at = []

    def usage(place: Path) -> type[Disk]:
        looked_at.append(place)
        return Disk

    monkeypatch.setattr(shutil, "disk_usage", usage)
    missing = tmp_path / "not" / "yet"
    assert cache_bytes(missing, 1 << 40) == int(DISK_SHARE * 10e9) and looked_at == [tmp_path]
    assert cache_bytes(missing, 500 << 20) == 500 << 20
    assert cache_bytes(missing, 1) == CACHE_BYTES_MIN == cache_bytes(missing, 1 << 40, wanted_bytes=1)
    assert cache_bytes(missing, 1, wanted_bytes=5e9) == 5_000_000_000
