"""The file of the inner optimizer's state: whole after a kill, dropped where it does not fit, of several ranks."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from peer.checkpoint import inner_state
from peer.checkpoint.inner_state import DROPPED, HEAD_BYTES, NAME, UNSAVED, InnerStateFile, Sum, identity_of
from peer.footprint.kept import INNER_STATE_S
from peer.ipc.span import Span
from tests.peer.support.worker_harness import MODEL
from tests.support.forking.forked import ForkedProcess

SIZE = 4096 * 3 + 8
OF = bytes(32)


class Told:
    """Notes the events."""

    def __init__(self) -> None:
        self.ticks = 0
        self.events: list[tuple[str, object]] = []

    def emit(self, name: str, /, **fields: str | int | float | bool | None) -> None:
        self.events.append((name, fields["reason"]))


def state_file(folder: Path, told: Told, of: bytes = OF, rank: int = 0, sum: Sum = tuple) -> InnerStateFile:
    return InnerStateFile(folder, "group", of, SIZE, rank, sum, told)


def filled(value: int, part: slice = slice(None)) -> Callable[[torch.Tensor], None]:
    def write(out: torch.Tensor) -> None:
        out[part].fill_(value)

    return write


def loaded(file: InnerStateFile) -> int | None:
    """Return the value that the whole state has; None if there was none to take."""
    found: list[int] = []

    def restore(state: torch.Tensor) -> None:
        assert len(state) == SIZE and torch.equal(state, state[:1].expand(SIZE))
        found.append(int(state[0]))

    file.load(restore)
    return found[0] if found else None


def test_a_state_is_what_was_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system cannot reserve room."""
    told = Told()
    assert loaded(state_file(tmp_path, told)) is None
    state_file(tmp_path, told).save_small(filled(1))
    assert loaded(state_file(tmp_path, told)) == 1
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    state_file(tmp_path, told).save_small(filled(2))
    assert loaded(state_file(tmp_path, told)) == 2
    assert not told.events and os.listdir(tmp_path) == [NAME]


def test_a_large_state_is_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_state, "SMALL_BYTES", SIZE - 1)
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    told, found = Told(), list[int | None]()
    file = state_file(tmp_path, told)
    for value, later_s in enumerate((0, INNER_STATE_S - 1, 1, INNER_STATE_S - 1, 1)):
        now[0] += later_s
        file.save_small(filled(value))
        file.save_large(filled(value))
        found.append(loaded(state_file(tmp_path, Told())))
    assert found == [None, None, 2, 2, 4]
    assert told.ticks, "it is not taken for hung meanwhile"


@pytest.mark.parametrize("at", [0, 9, HEAD_BYTES, -1])
def test_a_damaged_file_is_dropped(tmp_path: Path, at: int) -> None:
    told = Told()
    state_file(tmp_path, told).save_small(filled(1))
    content = bytearray((tmp_path / NAME).read_bytes())
    content[at] ^= 255
    (tmp_path / NAME).write_bytes(content)
    assert loaded(state_file(tmp_path, told)) is None
    [(name, reason)] = told.events
    assert name == DROPPED and "damaged: the inner optimizer begins at zero" in str(reason)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("size", [0, 20, HEAD_BYTES, HEAD_BYTES + SIZE - 1])
def test_a_file_that_was_cut_off_is_dropped(tmp_path: Path, size: int) -> None:
    told = Told()
    state_file(tmp_path, told).save_small(filled(1))
    os.truncate(tmp_path / NAME, size)
    assert loaded(state_file(tmp_path, told)) is None and [name for name, _ in told.events] == [DROPPED]


def test_a_state_of_another_run_stage_or_optimizer_is_dropped(tmp_path: Path) -> None:
    model, whole, half = MODEL, Span.whole(2), Span(0, 1, 2)
    names = [identity_of("run", model, whole, "adamw"), identity_of("run", model, half, "adamw")]
    names += [identity_of("other", model, whole, "adamw"), identity_of("run", model, whole, "lion")]
    for name in names[1:]:
        told = Told()
        state_file(tmp_path, told, name).save_small(filled(1))
        assert loaded(state_file(tmp_path, told, names[0])) is None
        [(event, reason)] = told.events
        assert event == DROPPED and "another run, model, stage or optimizer" in str(reason)


def test_a_full_disk_costs_only_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    file = state_file(tmp_path, told)
    file.save_small(filled(1))

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for _ in range(2):  # told once, until it is over
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full, raising=False)
            file.save_small(filled(2))
            file.save_small(filled(3))
        assert loaded(state_file(tmp_path, told)) == 1 and os.listdir(tmp_path) == [NAME]
        file.save_small(filled(1))
    assert [name for name, _ in told.events] == [UNSAVED] * 2
    assert "No space left on device; it takes 1 MiB" in str(told.events[0][1])


@pytest.mark.process
def test_a_kill_leaves_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    values = {"filled by half": 1, "sealed": 1, "renamed": 2}
    folders = [tmp_path / name for name in values]
    for folder in folders:
        folder.mkdir()
    with ForkedProcess("tests.peer.checkpoint.state_child", *map(str, folders)) as child:
        assert child.wait(300) == 0
    assert len(os.listdir(folders[0])) == 2
    for folder in folders:
        told = Told()
        assert loaded(state_file(folder, told)) == values[folder.name]
        assert not told.events and os.listdir(folder) == [NAME], "what the killed one has left is gone"


class Sums:
    """Adds up over the threads that stand for ranks."""

    def __init__(self, ranks: int) -> None:
        self._values: list[Sequence[float]] = [()] * ranks
        self._barrier = threading.Barrier(ranks, timeout=60)

    def of(self, rank: int) -> Sum:
        def add_up(values: Sequence[float]) -> list[float]:
            self._values[rank] = values
            self._barrier.wait()
            total = [sum(column) for column in zip(*self._values, strict=True)]
            self._barrier.wait()  # none writes its next values before all have read these
            return total

        return add_up


def test_ranks_write_one_file_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums, told = Sums(2), [Told(), Told()]
    files = [state_file(tmp_path, told[rank], rank=rank, sum=sums.of(rank)) for rank in range(2)]

    def both(value: int) -> list[int | None]:
        """Each writes its half; return what each then loads."""

        def run(rank: int) -> int | None:
            files[rank].save_small(filled(value, slice(rank * SIZE // 2, (rank + 1) * SIZE // 2)))
            return loaded(files[rank])

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, range(2)))

    assert both(1) == [1, 1]

    def no_room(path: Path, access: int) -> torch.Tensor:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        mapped = files[1]._mapped
        patch.setattr(
            files[1], "_mapped", lambda path, access: (mapped if path.name == NAME else no_room)(path, access)
        )
        assert both(2) == [1, 1]
    assert not told[0].events and [name for name, _ in told[1].events] == [UNSAVED]
    assert both(3) == [3, 3] and os.listdir(tmp_path) == [NAME]
