"""Adapters of one served model, as real processes: each answer is that of its own adapter, also after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio

from peer.config import AdapterConfig
from peer.errors import CheckpointError, ConfigError
from peer.events import EventLog
from peer.identity import Identity
from peer.model.adapter_files import export_adapter
from peer.model.hub_config import read_served_config
from peer.model.layout import FlatLayout
from swarm.gateway.app import _named
from swarm.gateway.errors import ApiError
from swarm.run.home import Home
from swarm.serving.adapters import found_adapters
from swarm.serving.config import ServeConfig
from swarm.serving.create_model import PreparedModel, create_model
from swarm.serving.peer import _reopen_or_prepare
from tests.swarm.gateway.served_model import write_checkpoint
from tests.swarm.serving.serving_swarm import open_serving, reference_model
from tests.swarm.serving.test_serving import GREEDY, ask, say

PROMPT = list(b"Once upon a time there was a swarm")
COUNT = 16


def write_adapter(base: Path, folder: Path, seed: int, rank: int) -> Path:
    """Write a random adapter of the checkpoint in `base` as PEFT does."""
    config, _ = read_served_config((base / "config.json").read_bytes())
    model = msgspec.structs.replace(config, adapter=AdapterConfig(rank=rank, alpha=2.0 * rank))
    flat = 0.1 * torch.randn(FlatLayout.of(model).numel, generator=torch.Generator().manual_seed(seed))
    export_adapter(folder, model, flat, str(base))
    return folder


def by_peft(adapter: Path | None) -> list[int]:
    """Return what `transformers` with PEFT says after the prompt, greedily."""
    ids, model = torch.tensor([PROMPT]), reference_model()
    if adapter is not None:
        peft: Any = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    out = model.generate(input_ids=ids, max_new_tokens=COUNT, do_sample=False, attention_mask=torch.ones_like(ids))
    if adapter is not None:
        model.unload()
    return [int(token) for token in out[0, ids.shape[1] :]]


@pytest.mark.process
async def test_two_adapters_and_the_base_answer_at_once_and_one_survives_a_kill(tmp_path: Path) -> None:
    async with open_serving(tmp_path) as swarm:
        base = tmp_path / "checkpoint"
        one, two = (write_adapter(base, tmp_path / name, seed, 4 * seed) for seed, name in ((1, "one"), (2, "two")))
        wanted = {"one": by_peft(one), "two": by_peft(two), "": by_peft(None)}
        assert len({tuple(tokens) for tokens in wanted.values()}) == 3
        await swarm.serve("s0", "0:3", "--adapter", f"one={one}", "--adapter", f"two={two}")
        second = await swarm.serve("s1", "3:6")
        await swarm.serve("s2", "3:6")
        async with swarm.client() as model:
            assert model.names == (model.manifest.name, "one", "two")
            said: dict[str, list[int]] = {}

            async def answer(name: str) -> None:
                said[name] = await ask(model.named(name) if name else model, PROMPT, COUNT)

            async with trio.open_nursery() as nursery:
                for name in wanted:
                    nursery.start_soon(answer, name)
            assert said == wanted
            session = model.named("two").session(GREEDY)
            assert await say(session, PROMPT, COUNT, at={6: second.kill}) == wanted["two"]
            session.close()
            with pytest.raises(ConfigError, match="'three' is not served here: ask for 'checkpoint' or 'one' or 'two'"):
                model.named("three")
            with pytest.raises(ApiError, match="'three' is not served here"):
                _named(model, "three")


def test_an_adapter_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    base, home = tmp_path / "base", Home(tmp_path / "home")
    write_checkpoint(base)
    config, _ = read_served_config((base / "config.json").read_bytes())
    adapter = write_adapter(base, tmp_path / "adapter", 1, 2)
    (good,) = found_adapters(home, config, {"good": adapter})
    assert good.name == "good" and good.adapter == AdapterConfig(rank=2, alpha=4.0)
    (again,) = found_adapters(home, config, {"again": adapter})
    assert again.root == good.root
    wider = msgspec.structs.replace(config, intermediate_size=2 * config.intermediate_size)
    with pytest.raises(CheckpointError, match=r"is not of shape .*: use the adapter's own base"):
        found_adapters(home, wider, {"good": adapter})
    with pytest.raises(ConfigError, match=r"--adapter =.*: name is '': give 1 to 64 printable characters"):
        found_adapters(home, config, {"": adapter})
    with pytest.raises(ConfigError, match="--adapter was given 65 times: serve at most 64"):
        found_adapters(home, config, {str(number): adapter for number in range(65)})


def test_other_adapters_than_those_of_the_founded_model_are_refused(tmp_path: Path) -> None:
    base, home = tmp_path / "base", tmp_path / "home"
    write_checkpoint(base)
    adapter, identity = write_adapter(base, tmp_path / "adapter", 1, 2), Identity.load_or_create(home / "key")

    def config(*names: str) -> ServeConfig:
        return ServeConfig(home=home, folder=base, adapters=dict.fromkeys(names, adapter))

    prepared = _reopen_or_prepare(config("one"), identity)
    assert isinstance(prepared, PreparedModel)
    trio.run(create_model, home, prepared, identity, EventLog(), {"one": adapter})
    assert (
        _reopen_or_prepare(config(), identity) is not None and _reopen_or_prepare(config("one"), identity) is not None
    )
    with pytest.raises(ConfigError, match="serves its model with one: drop --adapter, or give another --home"):
        _reopen_or_prepare(config("two"), identity)
