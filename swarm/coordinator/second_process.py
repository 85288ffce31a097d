"""Two processes with one coordinator's key, as where its home was copied: each would sign a history of its own.

The one that starts looks for the other before it listens: it dials where the coordinator of its home was last, and at
the addresses in its record at the members. A connection proves that a process with the key lives; the record of one
that has ended proves nothing. It then informs that process, so that its operator learns of it too, and stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Final

import msgspec
import trio

from peer.catalogue.groups import SecondProcess
from peer.errors import BarnraiseError, ProtocolViolation, ResourceError
from peer.events import EventLog
from peer.identity import Identity, sign_bytes, verify_bytes
from peer.net.host import Host, open_host
from peer.net.method import Call, Empty, Method
from swarm.client.session import open_client
from swarm.run.home import Home
from swarm.run.invite import ADDRESSES_MAX, Invite
from swarm.run.manifest import open_any_manifest
from swarm.run.manifest_transfer import load_run_files

LOOK_S: Final = 6.0
"""All that a start waits for an answer, as where no peer of the run lives."""
DIAL_S: Final = 4.0
_KIND: Final = "second process"


class SecondStarted(msgspec.Struct, frozen=True):
    """Says that another process with the callee's key has found it and stops."""

    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    """By that key, over the caller's peer id."""


SECOND: Final = Method("coordinator.second", SecondStarted, Empty, access="open")


def serve_second(host: Host) -> None:
    """Tell of processes that were started with this host's key. Event: second_process."""

    async def on_second(call: Call[SecondStarted]) -> Empty:
        if not verify_bytes(host.peer_id, _KIND, call.peer.encode(), call.body.signature):
            raise ProtocolViolation("a process that has not this coordinator's key says that it has")
        host.events.emit(SecondProcess(ip=host.remote_ip(call.peer) or ""))
        return Empty()

    host.rpc.register(SECOND, on_second)


async def refuse_second(home: Home, more: Sequence[str] = ()) -> None:
    """Raise ResourceError if another process runs with the key of this coordinator's home. `more`: full addresses of
    peers of the run, beside those that the home knows. Nothing may listen with that key in this process."""
    kept = load_run_files(home.path)
    known = tuple(dict.fromkeys((*_lines(home), *home.living_addresses(), *more)))
    if kept is None or not (known or home.addresses.exists()):
        return  # a run that is new
    identity, found = Identity.load_or_create(home.identity), list[str]()
    invite = Invite(open_any_manifest(kept[0]).run_id, identity.peer_id, known[:ADDRESSES_MAX])
    own = f"/p2p/{identity.peer_id}"
    caller = open_host(identity=Identity.generate(), events=EventLog(), bulk_port=None)
    with trio.move_on_after(LOOK_S):
        async with caller as host, trio.open_nursery() as nursery:
            dialled = set[str]()

            async def dial(address: str) -> None:
                with suppress(BarnraiseError):
                    await host.connect_address(address, timeout_s=DIAL_S)
                    found.append(address.removesuffix(own))
                    signature = sign_bytes(identity, _KIND, host.peer_id.encode())
                    await host.rpc.call(identity.peer_id, SECOND, SecondStarted(signature), timeout_s=DIAL_S)
                if found:
                    nursery.cancel_scope.cancel()

            def dial_all(addresses: Sequence[str]) -> None:
                for address in addresses:
                    if address not in dialled:
                        dialled.add(address)
                        nursery.start_soon(dial, address)

            dial_all([address for address in known if address.endswith(own)])
            with suppress(BarnraiseError):
                async with open_client(invite, home.path) as client:
                    record = (await client.members()).get(identity.peer_id)
                    dial_all([f"{address}{own}" for address in record.addresses] if record else [])
    if found:
        raise ResourceError(
            f"another process runs with the key of this coordinator, at {found[0]}: stop one of the two, since together"
            " they would make two histories of one run"
        )


def _lines(home: Home) -> tuple[str, ...]:
    """Return the addresses at which the coordinator last listened."""
    with suppress(OSError, UnicodeDecodeError):
        return tuple(home.listening.read_text().split())
    return ()
