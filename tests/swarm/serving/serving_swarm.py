"""Block servers as real processes on 127.0.0.1, of a tiny random Llama, and a client in this process."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import trio

from peer.data.tokenizer import ByteTokenizer
from peer.inference.wire_rows import rows_from, rows_to
from peer.ipc.block_messages import WireType
from swarm.inference.client import ModelClient, open_model
from swarm.inference.client_view import Patience
from swarm.run.invite import Invite
from tests.support.peer_process import POLL_S, PeerProcess
from tests.support.process_group import Launch, ProcessGroup

LAYERS: Final = 6
CONTEXT: Final = 4096
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@cache
def reference_model() -> Any:
    """Return a random Llama of `transformers`."""
    import transformers

    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    return model


def reference_tokens(prompt: Sequence[int], count: int, border: tuple[int, WireType] | None = None) -> list[int]:
    """Return what `transformers` says after a prompt, greedily. `border`: before this block, hidden states are rounded
    as they are on the wire in this type."""
    ids, model = torch.tensor([list(prompt)]), reference_model()
    with ExitStack() as stack:
        if border is not None:
            block, wire = border
            hook = model.model.layers[block].register_forward_pre_hook(lambda _, inputs: _rounded(*inputs, wire=wire))
            stack.callback(hook.remove)
        out = model.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
    return [int(token) for token in out[0, ids.shape[1] :]]


def _rounded(hidden: torch.Tensor, *rest: Any, wire: WireType) -> tuple[Any, ...]:
    payload = rows_to(hidden[0], wire)
    return (rows_from(payload, hidden.shape[2], wire, torch.float32)[None], *rest)


class ServingSwarm:
    """The servers of one model; the first one founds it."""

    def __init__(self, folder: Path, launch: Callable[[str], Launch] = lambda name: Launch()) -> None:
        """`launch`: how the server of that name is started."""
        self.folder = folder
        self.group = ProcessGroup(folder, launch)
        self.servers: dict[str, PeerProcess] = {}

    @property
    def invite(self) -> Invite:
        """One that works through a server that lives."""
        living = next(server for server in self.servers.values() if server.alive and not server.is_stopped)
        return Invite.parse((living.home / "invite").read_text())

    async def serve(self, name: str, blocks: str, *options: str) -> PeerProcess:
        """Start a server and wait until it serves."""
        source = [str(self.invite)] if self.servers else ["--model", str(self.folder / "checkpoint")]
        fixed = ["--name", name, "--threads", "1", "--blocks", blocks]
        server = self.servers[name] = self.group.start(name, ["serve", *source, *fixed, *options])
        await server.wait_for("blocks_served", timeout_s=120)
        return server

    @asynccontextmanager
    async def client(self, patience: Patience | None = None) -> AsyncIterator[ModelClient]:
        """Open a client that knows all servers that live."""
        async with open_model(self.invite, patience=patience) as model:
            await self.known(model)
            yield model

    async def known(self, model: ModelClient) -> None:
        """Wait until a client sees all servers that live, and that they serve."""
        living = {name for name, server in self.servers.items() if server.alive}
        with trio.fail_after(120):
            while True:
                await model.servers.refresh(0.0)
                view = model.servers.view()
                if living <= {record.name for record in view.servers.values() if record.serves(view.now)}:
                    return
                await trio.sleep(10 * POLL_S)

    def name_of(self, model: ModelClient, peer: str) -> str:
        """Return the name of a server by its id."""
        return model.servers.records[peer].name


@asynccontextmanager
async def open_serving(
    folder: Path, launch: Callable[[str], Launch] = lambda name: Launch(), /, **servers: str
) -> AsyncIterator[ServingSwarm]:
    """Start servers of these blocks, by name. `launch`: as in `ServingSwarm`."""
    swarm = ServingSwarm(folder, launch)
    try:
        async with _served(swarm, servers):
            yield swarm
    finally:
        with trio.CancelScope(shield=True):
            await swarm.group.end_all()


@contextmanager
def serving(folder: Path, **servers: str) -> Iterator[ServingSwarm]:
    """Start servers for the tests of a module, which leave them as they are."""
    swarm = ServingSwarm(folder)

    async def start() -> None:
        async with _served(swarm, servers):
            pass

    try:
        trio.run(start)
        yield swarm
    finally:
        trio.run(swarm.group.end_all)


@asynccontextmanager
async def _served(swarm: ServingSwarm, servers: dict[str, str]) -> AsyncIterator[None]:
    """Start the servers, and read what they report inside the block."""
    reference_model().save_pretrained(swarm.folder / "checkpoint")
    ByteTokenizer().save(swarm.folder / "checkpoint")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(swarm.group.run)
        try:
            for name, blocks in servers.items():
                await swarm.serve(name, blocks)
            yield
        except Exception:
            sys.stderr.write(swarm.group.ended())
            raise
        nursery.cancel_scope.cancel()
