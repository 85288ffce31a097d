"""The format of a data set: its index, its files, and which tokens a sample's number means."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from peer.catalogue.pages import SamplesHashed
from peer.data import first_samples
from peer.data.pages.cache import CachedPages, PageCache
from peer.data.pages.corpus import PagedCorpus, pages_of, place_of
from peer.data.pages.folder import BuiltPages, fault_of, read_page
from peer.data.pages.index import PAGE_BYTES_MAX, PageIndex, encode_index, read_index
from peer.errors import ConfigError
from tests.peer.data.pages.data_sets import marks_of, write_data_set

SEQ_LEN = 4095  # 512 windows a page: 8 KiB each
A_PAGE = 512


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[BuiltPages, np.ndarray, np.ndarray]:
    folder = tmp_path_factory.mktemp("set")
    _, train, held_out = write_data_set(folder, seq_len=SEQ_LEN, windows=3 * A_PAGE + 17, held_out=9)
    return BuiltPages.open(folder), train, held_out


def corpus_of(built: BuiltPages) -> PagedCorpus:
    return PagedCorpus(built.index, built.index.config.root, [built])


def test_an_epoch_takes_each_window_once_and_each_number_means_one(
    built: tuple[BuiltPages, np.ndarray, np.ndarray],
) -> None:
    pages, train, _ = built
    corpus = corpus_of(pages)
    windows = corpus.windows
    assert windows == len(train)
    for epoch in (0, 3):
        places = [place_of(pages.index, epoch * windows + at, 7) for at in range(windows)]
        assert sorted(page * A_PAGE + row for page, row in places) == [*range(windows)]
    numbers = [0, 1, 511, 512, windows - 1, windows, 5 * windows + 3]
    batch = corpus.batch(numbers, 7)
    assert batch.shape == (len(numbers), SEQ_LEN + 1)
    for row, number in zip(batch.numpy(), numbers, strict=True):
        page, at = place_of(pages.index, number, 7)
        assert (row == train[page * A_PAGE + at]).all()


def test_the_order_differs_by_epoch_and_by_seed(built: tuple[BuiltPages, np.ndarray, np.ndarray]) -> None:
    index = built[0].index
    windows = index.train.windows

    def order(first: int, seed: int) -> list[tuple[int, int]]:
        return [place_of(index, first + at, seed) for at in range(windows)]

    assert order(0, 1) != order(windows, 1) != order(0, 2) != order(0, 1)
    assert order(0, 1) == order(0, 1)


def test_a_range_of_numbers_touches_few_pages(built: tuple[BuiltPages, np.ndarray, np.ndarray]) -> None:
    index = built[0].index
    windows = index.train.windows
    for first, last in ((0, 1), (0, A_PAGE), (500, 520), (A_PAGE, 3 * A_PAGE), (windows - 20, windows + 5), (9, 9)):
        pages = pages_of(index, [(first, last)], 3)
        assert set(pages) == {place_of(index, number, 3)[0] for number in range(first, last)}
        assert len(pages) <= (last - first) // A_PAGE + 3
    assert pages_of(index, [(0, windows)], 3)[-1] == 3  # the shorter page
    assert len(pages_of(index, [(0, 10 * windows)], 3)) == 4


def test_held_out_windows_are_those_of_the_first_held_out_page(
    built: tuple[BuiltPages, np.ndarray, np.ndarray],
) -> None:
    pages, _, held_out = built
    batches = [*corpus_of(pages).held_out_batches(2, 3)]
    assert [batch.shape for batch in batches] == [(2, SEQ_LEN + 1)] * 3
    found = np.concatenate([batch.numpy() for batch in batches])
    assert (found == held_out[[at * 9 // 6 for at in range(6)]]).all()
    assert len([*corpus_of(pages).held_out_batches(4, 100)]) == 3  # 4 + 4 + 1


def test_large_vocabularies_take_four_bytes_an_id(tmp_path: Path) -> None:
    index, train, _ = write_data_set(tmp_path, seq_len=15, windows=8, vocab_size=100_000)
    assert index.row_bytes == 64
    batch = corpus_of(BuiltPages.open(tmp_path)).batch([*range(8)], 0)
    assert sorted(map(tuple, batch.tolist())) == sorted(map(tuple, train.tolist()))


def test_a_set_of_several_files_finds_each_page(tmp_path: Path) -> None:
    index, _, _ = write_data_set(tmp_path, seq_len=SEQ_LEN, windows=64 * A_PAGE + 1)
    built = BuiltPages.open(tmp_path)
    assert [path.name for path, _ in built.files()] == [
        "train-00000.pages", "train-00001.pages", "held-out-00000.pages",
    ]  # fmt: skip
    for page in (0, 63, 64, 65):
        assert index.matches(page, read_page(index, page, built.find(page)))
    assert not [*built.damaged()]


def test_a_page_that_is_not_there_is_named(tmp_path: Path) -> None:
    index, _, _ = write_data_set(tmp_path / "set", seq_len=15, windows=4)
    with pytest.raises(ConfigError, match="page 0 of the data set is not on this machine"):
        PagedCorpus(index, index.config.root, [CachedPages(tmp_path)]).batch([1], 0)


def test_an_id_outside_the_vocabulary_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    index, _, _ = write_data_set(tmp_path, seq_len=15, windows=4, vocab_size=300)
    lying = msgspec.structs.replace(index, vocab_size=256)
    page = read_page(index, 0, BuiltPages(tmp_path, index).find(0))
    assert fault_of(index, 0, page) == ""
    assert "is not in the vocabulary of 256" in fault_of(lying, 0, page)
    with pytest.raises(ConfigError, match="is not in the vocabulary of 256"):
        PagedCorpus(lying, index.config.root, [BuiltPages(tmp_path, lying)]).batch([0, 1, 2, 3], 0)


def encoded_with(index: PageIndex, **changes: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.to_builtins(index, builtin_types=(bytes,)) | changes)


LIES: dict[str, dict[str, object]] = {
    "format": {"format": 2},
    "seq_len": {"seq_len": 0},
    "a window beyond a page": {"seq_len": PAGE_BYTES_MAX},
    "another length than the windows'": {"seq_len": SEQ_LEN * 2},
    "dtype": {"dtype": "uint32"},
    "no type": {"dtype": "float64"},
    "vocabulary": {"vocab_size": 0},
    "vast vocabulary": {"vocab_size": 1 << 40},
    "tokenizer": {"tokenizer": "../../etc/passwd"},
    "release": {"tokenizers": "\x1b[31m"},
    "license": {"license": "x" * 5000},
    "source": {"source": "a\nb"},
    "share": {"validation_share": float("nan")},
    "share above one": {"validation_share": 2.0},
    "seed": {"seed": -1},
    "no part": {"train": None},
    "no windows": {"train": {"windows": 0, "documents": 0, "text_bytes": 0, "hashes": b""}},
    "more windows than hashes": {"train": {"windows": 1 << 50, "documents": 1, "text_bytes": 1, "hashes": bytes(32)}},
    "a torn hash": {"train": {"windows": 1, "documents": 1, "text_bytes": 1, "hashes": bytes(31)}},
    "a hash too many": {"train": {"windows": 1, "documents": 1, "text_bytes": 1, "hashes": bytes(64)}},
    "negative sizes": {"train": {"windows": 1, "documents": -1, "text_bytes": 1, "hashes": bytes(32)}},
    "masked": {"masked": "yes"},
    "an unknown field": {"path": "/etc"},
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(built: tuple[BuiltPages, np.ndarray, np.ndarray], lie: str) -> None:
    with pytest.raises(ConfigError, match=r"the index .*`peer data build` writes one"):
        read_index(encoded_with(built[0].index, **LIES[lie]), "the index")


def test_an_index_is_read_as_it_was_written_and_in_no_other_form(
    built: tuple[BuiltPages, np.ndarray, np.ndarray],
) -> None:
    index = built[0].index
    encoded = encode_index(index)
    assert read_index(encoded, "the index", index.config) == index
    for torn in (encoded[:-1], encoded + b"\0", b"", b"\xc1", bytes(100)):
        with pytest.raises(ConfigError, match="`peer data build` writes one"):
            read_index(torn, "the index")
    with pytest.raises(ConfigError, match="larger than 4 MiB"):
        read_index(bytes(PAGE_BYTES_MAX + 1), "the index")


def test_an_index_of_another_data_set_than_the_manifests_is_refused(
    built: tuple[BuiltPages, np.ndarray, np.ndarray],
) -> None:
    index = built[0].index
    other = encode_index(msgspec.structs.replace(index, seed=5))
    with pytest.raises(ConfigError, match="of another data set than the run's"):
        read_index(other, "the index", index.config)
    lying = msgspec.structs.replace(index.config, windows=1)
    with pytest.raises(ConfigError, match="not those that the manifest names"):
        read_index(encode_index(index), "the index", lying)


def test_a_folder_with_a_missing_or_a_short_file_is_refused(tmp_path: Path) -> None:
    write_data_set(tmp_path, seq_len=15, windows=4)
    file = tmp_path / "train-00000.pages"
    os.truncate(file, 100)
    with pytest.raises(ConfigError, match="has 100 bytes instead of 128"):
        BuiltPages.open(tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        BuiltPages.open(tmp_path)


def test_a_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    index, train, _ = write_data_set(tmp_path / "set", seq_len=SEQ_LEN, windows=6 * A_PAGE)
    built = BuiltPages.open(tmp_path / "set")
    data = [read_page(index, page, built.find(page)) for page in range(6)]
    cache = PageCache(tmp_path / "cache", index, 3 * PAGE_BYTES_MAX)
    cache.open()
    for page in range(3):
        assert cache.put(page, data[page])
    assert cache.use(0)
    assert cache.put(3, data[3], kept=[2])
    assert {*cache.held} == {0, 2, 3}
    assert not cache.put(4, data[4], kept=[0, 2, 3])
    assert cache.read(2) == data[2]
    assert cache.read(1) is None

    again = PageCache(tmp_path / "cache", index, 2 * PAGE_BYTES_MAX)
    (tmp_path / "cache" / "5.part").write_bytes(b"torn")
    (tmp_path / "cache" / "77.page").write_bytes(b"no page of the set")
    again.open()
    assert len(again.held) == 2
    kept = max(again.held)
    with (tmp_path / "cache" / f"{kept}.page").open("r+b") as file:
        file.write(b"damage!!")
    assert not again.use(kept)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [f"{page}.page" for page in again.held]
    assert PagedCorpus(index, index.config.root, [CachedPages(tmp_path / "cache")]).windows == len(train)


def test_a_full_disk_shrinks_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, _, _ = write_data_set(tmp_path / "set", seq_len=SEQ_LEN, windows=4 * A_PAGE)
    built = BuiltPages.open(tmp_path / "set")
    data = [read_page(index, page, built.find(page)) for page in range(4)]
    cache = PageCache(tmp_path / "cache", index, 100 * PAGE_BYTES_MAX)
    cache.open()
    assert cache.put(0, data[0])
    assert cache.put(1, data[1])
    room = 2

    def full(path: Path, target: Path) -> None:
        if len([*(tmp_path / "cache").glob("*.page")]) >= room:
            raise OSError(28, "No space left on device")
        Path(path).rename(target)

    monkeypatch.setattr(os, "replace", full)
    assert cache.put(2, data[2])
    assert {*cache.held} == {1, 2}
    assert cache.limit_bytes == 2 * PAGE_BYTES_MAX
    assert not cache.put(3, data[3], kept=[1, 2])
    assert {*cache.held} == {1, 2}


def test_the_first_samples_are_told_once_with_the_hash_of_their_tokens(
    built: tuple[BuiltPages, np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, told = corpus_of(built[0]), list[SamplesHashed]()
    monkeypatch.setattr(first_samples, "FIRST_SAMPLES", 10)
    first = first_samples.FirstSamples(corpus, told.append)
    for numbers in ([0, 1, 2, 3], [4, 5, 90, 91], [92, 93, 94, 95], [7]):
        assert (first.batch(numbers, 7) == corpus.batch(numbers, 7)).all()
    (event,) = told
    assert event.samples == "0-6,90-94"
    read = corpus.batch([0, 1, 2, 3, 4, 5, 90, 91, 92, 93], 7).numpy()
    assert event.hash == blake3(read.astype("<u4").tobytes()).hexdigest()
    numbers = first_samples.parse_ranges(event.samples)
    assert first_samples.hash_of(corpus, numbers, 7) == event.hash != first_samples.hash_of(corpus, numbers, 8)
    for wrong in ("", "5", "5-5", "9-3", "a-b", "0-99999999"):
        with pytest.raises(ValueError):
            first_samples.parse_ranges(wrong)


def test_a_token_that_does_not_count_in_the_loss_is_given_with_a_mark(tmp_path: Path) -> None:
    index, train, _ = write_data_set(tmp_path, seq_len=20, windows=12, counting=0.3)  # 21 bits: not whole bytes
    assert index.row_bytes == 21 * 2 + 3
    corpus = corpus_of(BuiltPages.open(tmp_path))
    assert corpus.has_marks
    rows = [place_of(index, number, 4)[1] for number in range(12)]
    wanted = np.where(marks_of(train, 0.3), train.astype(np.int64), -1 - train.astype(np.int64))[rows]
    assert (corpus.batch([*range(12)], 4).numpy() == wanted).all()
    with pytest.raises(ValueError, match="do not belong together"):
        msgspec.structs.replace(index, chat_template="")
