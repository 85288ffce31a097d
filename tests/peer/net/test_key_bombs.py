"""Keys whose parsing takes seconds, and identify messages of a megabyte, cost the victim no more than a handshake.

How quick honest calls stay beside them is for `make soak`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import pytest
import trio
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.utils.varint import encode_uvarint

from peer.net.libp2p_fixes.identify import MESSAGE_BYTES_MAX, learn_observed_address
from peer.net.stream_channel import LOST
from tests.peer.support.attacked import Attacked, a_host, attacked_host
from tests.peer.support.honest import TIMED
from tests.peer.support.host_child import ECHO, Number, echo
from tests.peer.support.key_bombs import handshake, inverse_bomb, prime_bomb

BOMB_KINDS = (prime_bomb, partial(inverse_bomb, 61_000))
BOMBS = 20
TIMES_MAX = 10  # a handshake with a short key; a bomb that is parsed takes seconds
SHORT = bytes(36)

Attack = Callable[[], Awaitable[None]]
PAUSE_S = 0.1  # between two bombs: each meets other calls
PUSHED_BYTES = 1 << 20
GROWTH_MAX = 16 << 20

pytestmark = pytest.mark.process


@pytest.fixture
async def attacked() -> AsyncIterator[Attacked]:
    async with attacked_host() as attacked:
        yield attacked


async def push(connection: Any, message: bytes) -> None:
    """Push an identify message, as far as the other side takes it."""
    stream = await connection.new_stream()
    with suppress(*LOST), trio.fail_after(300):
        await stream.write(b"\x13/multistream/1.0.0\n" + bytes([len(ID_PUSH) + 1]) + ID_PUSH.encode() + b"\n")
        await stream.write(encode_uvarint(len(message)) + message)
        await stream.close_write()
        while await stream.read(4096):
            pass
    await stream.reset()


async def check_cheap(attacked: Attacked, harmless: Attack, bomb: Attack, timed: bool) -> None:
    """Check that the processor, and if `timed` an honest peer, hardly notices twenty bombs. `harmless` shows a short
    key instead."""

    async def repeat(what: Attack, pause_s: float = 0.0) -> None:
        for _ in range(BOMBS):
            await what()
            await trio.sleep(pause_s)

    if timed:
        quiet = await attacked.caller.latency()
        (await attacked.caller.latency(partial(repeat, bomb, PAUSE_S))).check_beside(quiet)
    usual = await attacked.cost_of(partial(repeat, harmless))
    cost = await attacked.cost_of(partial(repeat, bomb))
    print(f"{1e3 * cost.cpu_s / BOMBS:.2f} ms each, {1e3 * usual.cpu_s / BOMBS:.2f} ms without a bomb")  # noqa: T201
    assert cost.cpu_s <= TIMES_MAX * usual.cpu_s


@TIMED
async def test_keys_in_handshakes(attacked: Attacked, timed: bool) -> None:
    for made in BOMB_KINDS:
        short, long = (partial(handshake, attacked.port, key) for key in (SHORT, made()))
        await check_cheap(attacked, short, long, timed)


@TIMED
async def test_keys_in_pushes(attacked: Attacked, timed: bool) -> None:
    async with a_host() as attacker:
        connection = await attacked.dial(attacker)
        for made in BOMB_KINDS:
            short, long = (Identify(public_key=key).SerializeToString() for key in (SHORT, made()))
            await check_cheap(attacked, partial(push, connection, short), partial(push, connection, long), timed)


async def test_pushes_of_a_megabyte_leave_nothing_behind(attacked: Attacked) -> None:
    async with AsyncExitStack() as stack:
        connections = [await attacked.dial(await stack.enter_async_context(a_host())) for _ in range(5)]

        async def attack() -> None:
            for number in range(60):
                address = number.to_bytes(4, "big") * (PUSHED_BYTES // 4)
                message = Identify(listen_addrs=[address]).SerializeToString()
                await push(connections[number % len(connections)], message)

        cost = await attacked.cost_of(attack)
        assert cost.resident_bytes <= GROWTH_MAX
        assert cost.kept_addresses == 0


async def test_no_peer_is_asked_to_identify_itself() -> None:
    asked = 0

    async def answer(stream: Any) -> None:
        nonlocal asked
        asked += 1
        await stream.write(encode_uvarint(61_000) + inverse_bomb(61_000))

    async with a_host() as victim, a_host() as attacker:
        victim.rpc.register(ECHO, echo)
        attacker.rpc.register(ECHO, echo)
        attacker.libp2p.set_stream_handler(IDENTIFY, answer)
        await attacker.connect_address(victim.addresses[0], timeout_s=60)
        for caller, called in ((attacker, victim), (victim, attacker)):
            assert (await caller.rpc.call(called.peer_id, ECHO, Number(1), timeout_s=60)).body == Number(2)
    assert asked == 0


@pytest.mark.parametrize("padding", [0, MESSAGE_BYTES_MAX], ids=["bomb", "too long"])
async def test_of_a_relays_answer_only_the_observed_address_counts(
    padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object) -> None:
        raise AssertionError("a key is parsed")

    monkeypatch.setattr("Crypto.PublicKey.RSA.import_key", parse)
    monkeypatch.setattr("libp2p.host.observed_addr_manager.is_valid_observation", lambda address: True)
    seen = bytes.fromhex("04cb00710706104d")  # /ip4/203.0.113.7/tcp/4173
    message = Identify(public_key=prime_bomb(), observed_addr=seen, agent_version="x" * padding).SerializeToString()

    async def answer(stream: Any) -> None:
        await stream.write(encode_uvarint(len(message)) + message)
        await stream.close()

    async with a_host() as host, a_host() as relay:
        relay.libp2p.set_stream_handler(IDENTIFY, answer)
        await host.connect_address(relay.addresses[0], timeout_s=60)
        (connection,) = host.libp2p.get_network().get_connections()
        await learn_observed_address(host.libp2p, connection)
        observed = host.libp2p._observed_addr_manager.addrs(min_observers=1)
        assert [str(address) for address in observed] == ([] if padding else ["/ip4/203.0.113.7/tcp/4173"])
