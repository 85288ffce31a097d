"""Before a peer joins: the run's need against this machine's memory and disk, and whose folder it reads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from optim.config import GossipConfig
from peer.config import ComputeType, DataConfig, InnerConfig, ModelConfig, PagesConfig
from peer.errors import ConfigError, ResourceError
from peer.footprint.layout import ONE_DEVICE, Compute, Layout
from peer.footprint.optimizer_state import saved_bytes
from peer.footprint.parameters import parameter_shapes
from peer.identity import Identity
from peer.ipc.corpus_messages import OwnText
from swarm.pages.sizes import CACHE_BYTES_MIN
from swarm.placement.stages import state_bytes
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest
from swarm.run.peer_context import JoinConfig, Role
from swarm.training import join_checks
from swarm.training.join_checks import (
    check_disk,
    check_join,
    disk_needs,
    memory_needs,
    own_needs,
    room_for_stages,
    stages_in_files,
)
from swarm.training.machine_memory import Accelerator, accelerator_of, layout_of, step_size
from tests.swarm.run.test_manifest import make_manifest
from tests.swarm.training.test_roles import run_of

AUTHORITY = Identity.generate().peer_id
FOLDER = DataConfig(seq_len=64, source="folder")

LONG = msgspec.structs.replace(make_manifest(AUTHORITY).model, max_seq_len=1 << 24)
CPU = Accelerator.of("cpu", make_manifest(AUTHORITY).inner)  # with this machine's bf16 units, if it has any
NO_TEXT = OwnText()
SHARED = ("ddp", "fsdp")


def joining(
    home: Path,
    manifest: Manifest,
    role: Role = "auto",
    stage: int | None = None,
    text: OwnText = NO_TEXT,
    **computes: Any,
) -> JoinConfig:
    invite, compute = Invite(manifest.run_id, manifest.authority, ()), Compute(**{"device": "cpu", **computes})
    return JoinConfig(home, invite, role=role, stage=stage, text=text, compute=compute)


def computing(config: JoinConfig, **changes: Any) -> JoinConfig:
    return replace(config, compute=msgspec.structs.replace(config.compute, **changes))


def files_bytes(manifest: Manifest, stage: int = 0) -> int:
    """Return the bytes of a peer's files, without backups and tokens: five states and two of the inner optimizer."""
    shapes = parameter_shapes(manifest.model, range(*manifest.cuts[stage]))
    return 5 * state_bytes(manifest, stage) + 2 * saved_bytes(manifest.inner.optimizer, shapes)


def absurd(**changes: object) -> Manifest:
    """A run that its bounds allow and no machine of these tests can take part in."""
    model = ModelConfig(hidden_size=1 << 16, layers=8, heads=64, kv_heads=8, intermediate_size=1 << 17, max_seq_len=64)
    return make_manifest(AUTHORITY, **{"model": model, "cuts": ((0, 8),), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": LONG, "data": msgspec.structs.replace(FOLDER, seq_len=1 << 24)},
        {
            "model": msgspec.structs.replace(LONG, max_seq_len=1 << 16),
            "data": msgspec.structs.replace(FOLDER, seq_len=1 << 16),
            "inner": InnerConfig(lr=1.0, batch_size=1 << 20, total_steps=1),
        },
        {"model": msgspec.structs.replace(make_manifest(AUTHORITY).model, max_seq_len=1 << 24, head_dim=1 << 14)},
    ],
    ids=["parameters", "activations", "tokens", "rotary table"],
)
def test_a_run_that_needs_more_memory_than_there_is_is_refused_before_any_is_taken(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    if changes:
        changes = {"cuts": ((0, 1),), **changes}
    manifest = absurd(**changes)
    before = psutil.Process().memory_info().rss
    with pytest.raises(
        ResourceError, match=r"GB of memory are free and the model needs .*: free some, .*--memory-limit"
    ):
        check_join(joining(tmp_path, manifest, text=OwnText(str(tmp_path))), manifest)
    assert psutil.Process().memory_info().rss - before < 16 << 20


def test_split_weights_count_for_less_and_are_refused_in_one_sentence(tmp_path: Path) -> None:
    manifest = make_manifest(AUTHORITY)
    split = joining(tmp_path, manifest, weights="split", dtype="bf16")
    found, plain = accelerator_of(split, manifest), accelerator_of(computing(split, weights="fp32"), manifest)
    (need,), (wide,) = memory_needs(manifest, found), memory_needs(manifest, plain)
    assert found.weights == "split" and need < wide
    assert layout_of(split, manifest) == Layout()
    lion = msgspec.structs.replace(manifest, inner=msgspec.structs.replace(manifest.inner, optimizer="lion"))
    for config, run, words in (
        (split, run_of(3), "is for whole models, and this one is cut into stages"),
        (split, lion, "the run's optimizer is lion"),
        (computing(split, dtype="fp16"), manifest, "this device computes in fp16"),
        (computing(split, devices=("cpu",) * 2, layout="fsdp"), manifest, "is for one device, and there are 2"),
    ):
        with pytest.raises(ConfigError, match=rf"--weights split .*{words}.*: use --weights fp32"):
            check_join(config, run)


def test_the_users_limit_counts_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(AUTHORITY)
    (need,) = memory_needs(manifest, CPU, on_disk=True)
    monkeypatch.setattr(join_checks, "free_memory_bytes", lambda: need - 1)
    with pytest.raises(ResourceError, match="memory"):
        check_join(joining(tmp_path, manifest), manifest)
    check_join(joining(tmp_path, manifest, memory_bytes=need), manifest)
    with pytest.raises(ConfigError, match=r"--memory-limit is .* and the model needs .*: raise it"):
        check_join(joining(tmp_path, manifest, memory_bytes=need - 1), manifest)


def test_each_rank_needs_room(tmp_path: Path) -> None:
    manifest = make_manifest(AUTHORITY)
    found = {
        text: layout_of(joining(tmp_path, manifest, devices=("cpu",) * 2, layout=text), manifest) for text in SHARED
    }
    one, copies, shards = (memory_needs(manifest, CPU, layout)[0] for layout in (ONE_DEVICE, *found.values()))
    assert one < shards < copies < 2 * one


def test_devices_share_a_stage(tmp_path: Path) -> None:
    """Of the memory that all peers compare with what a stage takes on one device, the other devices' is gone."""
    manifest, copies, shards = run_of(3), Layout(replicate=2), Layout(shard=2)
    room = 1.001 * max(memory_needs(manifest, CPU, copies))
    alone = joining(tmp_path, manifest, memory_bytes=room)
    several = computing(alone, devices=("cpu",) * 2)
    assert layout_of(several, manifest) == copies and room_for_stages(alone, manifest) == room
    assert layout_of(computing(several, memory_bytes=0.9 * room), manifest) == shards
    for layout in (copies, shards):
        left = room_for_stages(computing(several, layout="ddp" if layout == copies else "fsdp"), manifest)
        needs = zip(memory_needs(manifest, CPU), memory_needs(manifest, CPU, layout), strict=True)
        assert max(memory_needs(manifest, CPU)) <= left < room
        assert all(shared - one <= room - left for one, shared in needs)
    with pytest.raises(ConfigError, match="tp shares whole models only"):
        layout_of(computing(several, layout="tp"), manifest)


def test_states_lie_in_files_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(AUTHORITY)
    (in_memory,), (in_files,) = (memory_needs(manifest, CPU, on_disk=on_disk) for on_disk in (False, True))
    assert in_files < in_memory
    much, little = (joining(tmp_path, manifest, memory_bytes=in_memory * factor) for factor in (1.26, 1.24))
    assert not stages_in_files(much, manifest) and stages_in_files(little, manifest) == [0]
    assert own_needs(much, manifest, CPU, ONE_DEVICE) == [in_memory]
    assert own_needs(little, manifest, CPU, ONE_DEVICE) == [in_files]
    assert disk_needs(manifest, "", [0]) > disk_needs(manifest, "")
    assert not stages_in_files(replace(little, state="memory"), manifest)
    assert stages_in_files(replace(much, state="disk"), manifest) == [0]
    short = joining(tmp_path, manifest, memory_bytes=in_files)
    check_join(short, manifest)
    with pytest.raises(ConfigError, match="--memory-limit is"):
        check_join(replace(short, state="memory"), manifest)
    monkeypatch.delattr("os.posix_fallocate")  # as on macOS
    assert not stages_in_files(little, manifest)
    with pytest.raises(ConfigError, match="--memory-limit is"):
        check_join(short, manifest)


def test_a_gossip_run_has_no_state_for_files(tmp_path: Path) -> None:
    manifest = make_manifest(AUTHORITY, outer=GossipConfig(steps=2))
    assert not stages_in_files(joining(tmp_path, manifest, memory_bytes=1.0), manifest)
    with pytest.raises(ConfigError, match="leave out --state disk"):
        check_join(replace(joining(tmp_path, manifest), state="disk"), manifest)


def test_states_in_memory_leave_less_room_for_a_stage(tmp_path: Path) -> None:
    manifest = run_of(3)
    auto = joining(tmp_path, manifest, memory_bytes=1e12)
    usual, own = (memory_needs(manifest, CPU, on_disk=on_disk) for on_disk in (True, False))
    assert room_for_stages(auto, manifest) == 1e12
    beyond = max(mine - theirs for theirs, mine in zip(usual, own, strict=True))
    assert room_for_stages(replace(auto, state="memory"), manifest) == 1e12 - beyond < 1e12


def test_devices_share_a_model_that_is_too_large_for_each(tmp_path: Path) -> None:
    manifest = absurd()
    config = joining(tmp_path, manifest, devices=("cpu",) * 2)
    (room,) = memory_needs(manifest, CPU, Layout(replicate=2))
    for memory, layout in ((room, Layout(replicate=2)), (0.9 * room, Layout(shard=2))):
        assert layout_of(computing(config, memory_bytes=memory), manifest) == layout
    with pytest.raises(ConfigError, match=r"heads is 64, which tp:3 does not divide"):
        layout_of(computing(config, devices=("cpu",) * 3, layout="tp"), manifest)


def test_a_step_is_as_large_as_the_share_of_each_rank(tmp_path: Path) -> None:
    """A batch of a million sequences: the memory decides."""
    inner = InnerConfig(lr=1.0, batch_size=1 << 20, total_steps=1)
    manifest = make_manifest(AUTHORITY, inner=inner)
    one = joining(tmp_path, manifest, memory_bytes=32e9)
    two = computing(one, devices=("cpu",) * 2, layout="ddp")
    assert step_size(two, manifest).sequences == step_size(one, manifest).sequences // 2 < 1 << 19


def test_a_pipeline_needs_room_for_the_smallest_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = run_of(3)
    needs = memory_needs(manifest, CPU, on_disk=True)
    assert min(needs) == needs[1] < needs[0]
    monkeypatch.setattr(join_checks, "free_memory_bytes", lambda: needs[1])
    check_join(joining(tmp_path, manifest), manifest)
    check_join(joining(tmp_path, manifest, "feeder"), manifest)
    with pytest.raises(ResourceError, match="stage 0 needs"):
        check_join(joining(tmp_path, manifest, "stage", 0), manifest)


def test_a_run_that_needs_more_disk_than_there_is_is_refused(tmp_path: Path) -> None:
    manifest = absurd()
    with pytest.raises(ResourceError, match=r"are free on the disk of .* need .*: free some space"):
        check_join(joining(tmp_path, manifest, memory_bytes=1e18), manifest)


def test_what_the_home_holds_already_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(AUTHORITY)
    free = files_bytes(manifest) - 4096
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(ResourceError, match="free some space"):
        check_join(joining(tmp_path, manifest), manifest)
    (tmp_path / "checkpoint").write_bytes(bytes(8192))
    check_join(joining(tmp_path, manifest), manifest)


def test_the_disk_must_hold_the_token_cache_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, text = tmp_path / "home", tmp_path / "text"
    for folder in (home, text):
        folder.mkdir()
    (text / "a.txt").write_bytes(bytes(1 << 20))
    (text / "a.bin").write_bytes(bytes(1 << 20))  # no text
    manifest = msgspec.structs.replace(make_manifest(AUTHORITY), data=FOLDER)
    tokenized = msgspec.structs.replace(manifest, tokenizer="ab" * 32)
    (bare,) = disk_needs(manifest, str(text))
    assert bare == files_bytes(manifest)
    assert disk_needs(tokenized, str(text)) == [bare + (2 << 20)]  # four bytes for each id of at least two
    assert disk_needs(tokenized, "") == [bare]
    free = bare + (2 << 20) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    check_disk(joining(home, manifest, text=OwnText(str(text))), manifest)
    with pytest.raises(ResourceError, match="checkpoints, results and tokens need"):
        check_disk(joining(home, tokenized, text=OwnText(str(text))), tokenized)
    free = (2 << 20) - 1
    with pytest.raises(ResourceError, match="tokens need"):
        check_disk(joining(home, tokenized, "feeder", text=OwnText(str(text))), tokenized)


def test_a_run_of_pages_needs_room_for_the_smallest_cache_and_for_no_text(tmp_path: Path) -> None:
    pages = PagesConfig(root="ab" * 32, index_bytes=500, row_bytes=2048, windows=10, held_out_windows=1)
    data = DataConfig(seq_len=64, source="pages", pages=pages)
    manifest = make_manifest(AUTHORITY, data=data, requires=("pages",), tokenizer="ab" * 32)
    bare = files_bytes(manifest)
    assert disk_needs(manifest, "") == [bare + CACHE_BYTES_MIN] and disk_needs(manifest, str(tmp_path)) == [bare]


def test_a_stage_of_a_pipeline_keeps_backups_of_the_next_one() -> None:
    manifest = run_of(3)
    sizes = [state_bytes(manifest, stage) for stage in range(3)]
    assert disk_needs(manifest, "") == [files_bytes(manifest, stage) + 4 * sizes[(stage + 1) % 3] for stage in range(3)]


@pytest.mark.parametrize(("role", "stage"), [("auto", None), ("feeder", None), ("stage", 0)])
def test_a_run_of_text_of_ones_own_needs_a_folder(tmp_path: Path, role: Role, stage: int | None) -> None:
    manifest = msgspec.structs.replace(run_of(1 if role == "auto" else 3), data=FOLDER)
    with pytest.raises(ConfigError, match="text of your own: name a file or folder of text with --data PATH"):
        check_join(joining(tmp_path, manifest, role, stage), manifest)
    check_join(joining(tmp_path, manifest, role, stage, text=OwnText("text")), manifest)


def test_a_later_stage_reads_no_text(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(run_of(3), data=FOLDER)
    check_join(joining(tmp_path, manifest), manifest)
    check_join(joining(tmp_path, manifest, "stage", 1), manifest)


@pytest.mark.parametrize(("own", "narrow"), [("fp32", False), ("bf16", True), ("fp16", True)])
def test_what_a_step_takes_is_counted_in_the_peers_own_type(tmp_path: Path, own: ComputeType, narrow: bool) -> None:
    """With fp16 as with bf16."""
    manifest = make_manifest(AUTHORITY, inner=msgspec.structs.replace(make_manifest(AUTHORITY).inner, dtype="fp32"))
    found = accelerator_of(joining(tmp_path, manifest, dtype=own), manifest)
    assert found == Accelerator("cpu", narrow)
