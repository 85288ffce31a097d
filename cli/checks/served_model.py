"""Checks of `peer doctor` on a served model: its blocks, and the way to its servers, alone and while they compute."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from statistics import median
from typing import Final

import trio

from cli.checks.machine import Finding, failure
from peer.errors import BarnraiseError
from peer.figures import several
from peer.ipc.sampling_options import Sampling
from peer.net.flow.flow import BEAT_S, Flow
from swarm.client.session import RunClient
from swarm.inference.client_view import ServersView
from swarm.inference.coverage import block_states, troubles
from swarm.inference.server_flows import ServerFlows
from swarm.inference.session import RemoteSession
from swarm.run.manifest import served_manifest
from swarm.serving.memory import blocks_that_fit

ALONE_S: Final = 8 * BEAT_S
LOADED_S: Final = 2.0
PROMPT_TOKENS: Final = 1024
PROBED_MAX: Final = 16
_SLOW_MS: Final = 100.0
"""A round trip that grows by this much under load is a warning."""


class _Model:
    """A client's view of a model, without its text."""

    def __init__(self, client: RunClient, servers: ServersView) -> None:
        self.client, self.servers = client, servers
        self.server_flows = ServerFlows(client.host)


async def model_findings(client: RunClient) -> AsyncIterator[Finding]:
    """Check a served model: room here for blocks of it, servers of all its blocks, and round trips to them."""
    manifest = served_manifest(client.manifest)
    room = blocks_that_fit(manifest, None)
    of = several(manifest.model.layers, "block")
    if room:
        yield Finding("memory", "ok", f"room for {min(room, manifest.model.layers)} of {of}")
    else:
        yield Finding("memory", "warning", f"no room for one of {of}", "free memory to serve; a client needs none")
    model = _Model(client, ServersView(client.host, client.node, manifest.run_id, manifest.model.layers))
    await model.servers.refresh()
    view = model.servers.view()
    yield blocks_finding(troubles(block_states(view)), len(view.servers), manifest.model.layers)
    async with _flows(model) as flows:
        alone = await _watch(flows, ALONE_S)
        errors = list[BarnraiseError]()
        loaded = await _under_load(model, flows, errors)
        for error in errors:
            yield failure("prompt", error)
        for peer in flows:
            yield round_trip_finding(view.servers[peer].name, alone.get(peer), loaded.get(peer))


def blocks_finding(wrong: list[str], servers: int, blocks: int) -> Finding:
    """Judge whether a new session finds a server for each block."""
    if wrong:
        return Finding("blocks", "failure", "; ".join(wrong), "serve them with `peer serve INVITE`", 3)
    return Finding("blocks", "ok", f"{several(servers, 'server')} hold all {several(blocks, 'block')}")


def round_trip_finding(name: str, alone_ms: float | None, loaded_ms: float | None) -> Finding:
    """Judge the round trips to a server, medians in ms; None where none was measured."""
    if alone_ms is None:
        remedy = "see whether it is frozen or cut off; clients use another one meanwhile"
        return Finding("round trip", "warning", f"{name} does not answer", remedy)
    detail = f"{name} {alone_ms:.1f} ms"
    if loaded_ms is None:
        return Finding("round trip", "ok", f"{detail} alone")
    detail = f"{detail} alone, {loaded_ms:.1f} ms while the servers compute a prompt"
    if loaded_ms > alone_ms + _SLOW_MS:
        remedy = "its processor or its uplink is full: give it fewer threads, or ask with --wire bf16 or int8"
        return Finding("round trip", "warning", detail, remedy)
    return Finding("round trip", "ok", detail)


@asynccontextmanager
async def _flows(model: _Model) -> AsyncIterator[dict[str, Flow | None]]:
    """Open flows with the servers inside the block, and keep them alive; None where a server does not answer."""
    flows: dict[str, Flow | None] = dict.fromkeys(list(model.servers.records)[:PROBED_MAX])

    async def open_one(peer: str) -> None:
        with suppress(BarnraiseError):
            flows[peer] = await model.server_flows.open(peer)

    async with trio.open_nursery() as nursery:
        for peer in flows:
            nursery.start_soon(open_one, peer)
    with ExitStack() as stack:
        for flow in flows.values():
            if flow is not None:
                stack.enter_context(flow.hold())
        yield flows


async def _watch(flows: Mapping[str, Flow | None], seconds: float) -> dict[str, float]:
    """Return the medians of the round trips of beats, in ms, by peer."""
    for flow in flows.values():
        if flow is not None:
            flow.round_trips.clear()
    await trio.sleep(seconds)
    return {
        peer: 1000 * median(flow.round_trips)
        for peer, flow in flows.items()
        if flow is not None and flow.is_open and flow.round_trips
    }


async def _under_load(
    model: _Model, flows: Mapping[str, Flow | None], errors: list[BarnraiseError]
) -> dict[str, float]:
    """Return the same while servers compute prompts; nothing where they cannot, with the reason in `errors`."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_compute_prompts, model, errors)
        found = await _watch(flows, LOADED_S)
        nursery.cancel_scope.cancel()
    return {} if errors else found


async def _compute_prompts(model: _Model, errors: list[BarnraiseError]) -> None:
    """Have prompts computed, one after the other, until cancelled. Their tokens are by chance: no server has them."""
    config = model.client.manifest.model
    count = min(PROMPT_TOKENS, config.max_seq_len - 1)
    while not errors:
        prompt = [secrets.randbelow(config.vocab_size) for _ in range(count)]
        session = RemoteSession(model.server_flows, model.servers, Sampling(), stops=(), model=config)
        try:
            async for _ in session.generate(prompt, 1):
                pass
        except BarnraiseError as error:
            errors.append(error)
        finally:
            session.close()
