"""A client of a served model: finds its servers and generates through them. It loads no torch, and keeps nothing.

async with open_model(invite) as model:
    session = model.session(Sampling(temperature=0.7, seed=1))
    async for drawn in session.generate(await model.text.encode("Once", special=True), 64): ...
    session.close()
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from peer.errors import ConfigError
from peer.ipc.block_messages import WireType
from peer.ipc.grammar_messages import Grammar
from peer.ipc.sampling_options import Sampling
from peer.worker.grammar.client import ModelGrammars, open_grammars
from peer.worker.text_client import ModelText, open_model_text
from swarm.client.session import RunClient, open_client
from swarm.inference.client_view import Patience, ServersView
from swarm.inference.record import SessionNeeds, check_commits, server_schema
from swarm.inference.server_flows import ServerFlows
from swarm.inference.session import RemoteSession
from swarm.run.invite import Invite
from swarm.run.manifest import AnyManifest, Manifest, ServedAdapter


@dataclass(frozen=True)
class ModelClient:
    """An open connection to a served model."""

    client: RunClient
    manifest: AnyManifest
    """Of a served model, or of a training run, whose last commit is asked then."""
    text: ModelText
    grammars: ModelGrammars
    """What answers may follow."""
    servers: ServersView
    server_flows: ServerFlows
    wire: WireType | None = None
    """The type of hidden states between servers, where a session names none; None: the model's."""
    adapter: ServedAdapter | None = None
    """Of a served model: the adapter that its sessions use; None for the model alone."""

    @property
    def name(self) -> str:
        """The name of the model, or of its adapter."""
        return self.manifest.name if self.adapter is None else self.adapter.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names that `named` takes: the model's, and those of its adapters."""
        return (self.manifest.name, *(adapter.name for adapter in _adapters(self.manifest)))

    def named(self, name: str) -> ModelClient:
        """Return the client of the model, by its name or run id, or of one of its adapters. Raises ConfigError."""
        if name in (self.manifest.name, self.manifest.run_id):
            return replace(self, adapter=None)
        found = next((adapter for adapter in _adapters(self.manifest) if adapter.name == name), None)
        if found is None:
            raise ConfigError(f"the model {name!r} is not served here: ask for {' or '.join(map(repr, self.names))}")
        return replace(self, adapter=found)

    @property
    def special(self) -> frozenset[int]:
        """The tokens that structure a text and are no part of it: the tokenizer's special ones, and those that the
        checkpoint names."""
        named = {self.manifest.text.bos_id, self.manifest.text.pad_id}
        return self.text.special | {token for token in named if token is not None}

    def session(
        self,
        sampling: Sampling,
        stops: Sequence[int] | None = None,
        wire: WireType | None = None,
        grammar: Grammar | None = None,
    ) -> RemoteSession:
        """Return a new session; call its `close` in the end. `stops`: tokens that end an answer; None: the model's.
        `wire`: the type of hidden states between servers; None: that of this client, which is the model's unless it was
        chosen, so that they arrive as they were. `grammar`: what its one answer follows. Raises GrammarRefused for one
        that is too long."""
        chosen = self.manifest.text.stops if stops is None else stops
        asked_wire = wire or self.wire
        chosen_wire = None if asked_wire == self.servers.dtype else asked_wire
        model = self.manifest.model
        adapter = b"" if self.adapter is None else self.adapter.tag
        needs = SessionNeeds(chosen_wire, adapter=adapter)
        follows = None if grammar is None else self.grammars.begin(grammar, chosen)
        return RemoteSession(
            self.server_flows, self.servers, sampling, stops=chosen, model=model, needs=needs, grammar=follows
        )


def _adapters(manifest: AnyManifest) -> tuple[ServedAdapter, ...]:
    return () if isinstance(manifest, Manifest) else manifest.adapters


@asynccontextmanager
async def open_model(
    invite: Invite,
    home: Path | None = None,
    wire: WireType | None = None,
    patience: Patience | None = None,
    name: str = "",
) -> AsyncIterator[ModelClient]:
    """Connect to the served model, or the training run, of `invite` inside the block. `wire`: the type of hidden states
    between servers; None: the model's. `patience`: with missing servers; None: hardly any. `name`: of an adapter of the
    model; empty for none. Raises ConfigError if it is a gossip run, or has no such adapter, and what `open_client`
    raises."""
    async with open_client(invite, home, schemas=lambda gate: [server_schema(gate)]) as client:
        manifest = client.manifest
        if isinstance(manifest, Manifest):
            check_commits(manifest)
        layers = manifest.model.layers
        servers = ServersView(client.host, client.node, manifest.run_id, layers, patience)
        size = manifest.model.vocab_size
        async with open_model_text(client.tokenizer, size) as text, open_grammars(client.tokenizer, size) as grammars:
            await servers.refresh()
            model = ModelClient(client, manifest, text, grammars, servers, ServerFlows(client.host), wire)
            yield model.named(name) if name else model
