"""The bytes in a machine's memory and on its disk, as the network process and its worker take them today."""

from __future__ import annotations

from typing import Final

from peer.footprint import kept
from peer.footprint.device import TOKEN_BYTES, device_items
from peer.footprint.optimizer_state import saved_bytes
from peer.footprint.stored import frozen_bytes
from peer.footprint.workload import Footprint, Workload

NETWORK_BYTES: Final = 0.25e9
"""The network process without a run, beside the libraries that it maps, which are files. An estimate;
`benchmarks/machine/footprint.py` compares the sums with peaks that were measured."""
WORKER_BYTES: Final = 0.25e9
"""A worker without a model on a CPU, with little text, counted alike."""
GPU_WORKER_BYTES: Final = 2.5e9
"""A worker that has loaded a GPU's libraries. An estimate."""
DAY_S: Final = 86400.0
_OWN: Final = "method's own vectors"
_SHARED: Final = "shared with the worker: outer weights, product"
_CHECKPOINTS_ON_THE_WAY: Final = 2  # one being written, and the file of a state being fetched
_BACKUPS: Final = kept.CHECKPOINTS + _CHECKPOINTS_ON_THE_WAY  # of the next stage


def footprint(work: Workload, token_cache_bytes: float = 0.0, next_stage_bytes: float = 0.0) -> Footprint:
    """Return all bytes of one peer. `next_stage_bytes`: the state of the stage that it backs up."""
    disk = disk_items(work, token_cache_bytes, next_stage_bytes)
    host = host_items(work)
    return Footprint(device_items(work), host, disk, work.device == "cpu", work.layout.size)


def host_items(work: Workload) -> dict[str, float]:
    """Return the bytes in the machine's memory beside the device's, after some rounds of a run, by item. Files are not
    counted: memory caches them as far as it has room."""
    exchange, vector, state = work.exchange, float(work.vector_bytes), float(work.state_bytes)
    moved, result = _exchange_bytes(work)
    own = exchange.private_vectors + exchange.is_merged_whole
    items = {
        "programs": NETWORK_BYTES + work.layout.size * (WORKER_BYTES if work.device == "cpu" else GPU_WORKER_BYTES),
        _SHARED: 0.0 if work.state_on_disk else 2 * vector,
        "state": 0.0 if work.state_on_disk else state,
        "next state": state if exchange.is_common and not work.state_on_disk else 0.0,
        "states kept for joiners": 0.0 if _joiners_read_files(work) else kept.snapshots(state) * state,
        _OWN: vector * own - _in_files(work),
        "merged result of the round": result,
        "small results kept": 0.0 if kept.result_lies_in_a_file(result) else _results_kept(work, result),
        "exchange of the round": moved,
        "small exchanges kept": kept.AUDITED * moved if exchange.is_common and not kept.lies_in_a_file(moved) else 0.0,
    }
    if not work.is_stage:
        items["tokens of a batch"] = float(TOKEN_BYTES * work.inner.batch_size * (work.seq_len + 1))
    if work.is_stage:
        items["weights being adopted"] = vector
    return {name: size for name, size in items.items() if size}


def _in_files(work: Workload) -> float:
    """Return the bytes of the method's own vectors that lie beside the state in files."""
    exchange = work.exchange
    return work.state_on_disk * work.vector_bytes * (exchange.memory_vectors + exchange.is_merged_whole)


def _joiners_read_files(work: Workload) -> bool:
    return work.state_on_disk or kept.snapshots_lie_in_files(work.state_bytes)


def _exchange_bytes(work: Workload) -> tuple[float, float]:
    """Return the bytes that a peer holds of one exchange beside its result, sent and received, and those of the
    result."""
    exchange, message = work.exchange, work.parameters / work.exchange.fragments
    sent = exchange.up * message
    received = sent * ((exchange.peers - 1) / exchange.peers if exchange.is_common else 1.0)
    return sent + received, exchange.result * message


def _results_kept(work: Workload, result_bytes: float) -> float:
    return kept.results(work.state_bytes, result_bytes) * result_bytes if work.exchange.is_common else 0.0


def written_in_a_day(work: Workload, rounds: float) -> float:
    """Return about how many bytes the disk takes in a day of `rounds` rounds: checkpoints, results, exchanges and the
    inner optimizer's state; with states in files also what is shared with the worker and the method's own vectors."""
    moved, result = _exchange_bytes(work)
    a_round = result + 2.0 * work.vector_bytes * work.state_on_disk + _in_files(work)
    if work.exchange.is_common and kept.lies_in_a_file(moved):
        a_round += moved
    checkpoints = rounds if work.state_on_disk else min(rounds, DAY_S / kept.CHECKPOINT_S)
    saved = saved_bytes(work.inner.optimizer, work.shapes)
    return rounds * a_round + checkpoints * work.state_bytes + min(rounds, DAY_S / kept.INNER_STATE_S) * saved


def disk_items(work: Workload, token_cache_bytes: float = 0.0, next_stage_bytes: float = 0.0) -> dict[str, float]:
    """Return the bytes on the home's disk at most, by item. The log of results grows until a checkpoint is
    written; with states in files each state is one."""
    state_bytes, (moved, result) = float(work.state_bytes), _exchange_bytes(work)
    is_common = work.exchange.is_common
    items = {
        "checkpoints kept": kept.CHECKPOINTS * state_bytes,
        "state, until it is a checkpoint": state_bytes if work.state_on_disk else 0.0,
        "next state": state_bytes if work.state_on_disk else 0.0,
        "checkpoint being written": 0.0 if work.state_on_disk else state_bytes,
        "state being fetched": state_bytes,
        "results since the last checkpoint": 2 * result if work.state_on_disk else state_bytes,
        "merged results kept": _results_kept(work, result) if kept.result_lies_in_a_file(result) else 0.0,
        "exchanges kept": kept.AUDITED * moved if is_common and kept.lies_in_a_file(moved) else 0.0,
        "states kept for joiners": kept.snapshots(state_bytes) * state_bytes if _joiners_read_files(work) else 0.0,
        "backup of the next stage": _BACKUPS * next_stage_bytes,
        _SHARED: 2.0 * work.vector_bytes if work.state_on_disk else 0.0,
        _OWN: _in_files(work),
        "inner optimizer, saved": 2.0 * saved_bytes(work.inner.optimizer, work.shapes),  # one being written
        "token ids": token_cache_bytes,
        "base": 0.0 if work.base is None else float(frozen_bytes(work.model, work.blocks, work.base)),
    }
    return {name: size for name, size in items.items() if size}
