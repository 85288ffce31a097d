"""A replica whose states lie in files: `peer join --state disk`."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from swarm.training.checkpoints import LocalCheckpoint
from tests.swarm.state.test_outer_state import go
from tests.swarm.support.stage_commits import STAGE, context_of
from tests.swarm.training.test_roles import run_of


async def test_a_replica_goes_on_from_its_files(tmp_path: Path) -> None:
    manifest = run_of(3)
    async with context_of(manifest, tmp_path / "home") as (found, seen):
        context = replace(found, config=replace(found.config, state="disk"))
        local = await LocalCheckpoint.open(context, STAGE)
        assert [event.name for event in seen] == ["state_in_files"]
        for number in (1, 2):
            go(local.state, number)
            head = msgspec.structs.replace(local.head, round=number, state_hash=local.state.tree.root)
            assert await local.save(head)
        files = local.state.current.files.values()
        [first, last] = [entry.path for entry in local.store.list()]
        assert all(os.path.samefile(file, last / file.name) for file in files)
        assert not any(os.path.samefile(file, first / file.name) for file in files)
        tensors, root = [tensor.clone() for tensor in local.state.tensors], local.state.tree.root
        (local.home.states / "left by a killed process").mkdir()

        again = await LocalCheckpoint.open(context, STAGE)
        assert again.head.round == 2 and again.state.tree.root == root
        assert all(map(torch.equal, again.state.tensors, tensors)) and not list(again.home.states.iterdir())
        go(again.state, 3)
        assert len(list(again.home.states.iterdir())) == 1 and last.exists()
        tree, states = again.state.tree, again.home.states
        go(again.state, 4)
        gc.collect()
        assert len(list(states.iterdir())) == 1, "the one before is gone"
        in_memory = await LocalCheckpoint.open(replace(found, config=replace(found.config, state="memory")), STAGE)
        go(in_memory.state, 3)
        assert in_memory.state.tree.root == tree.root, "where it lies changes no bit"
        assert not again.home.states.exists(), "who keeps them in memory leaves no files of an earlier start"
