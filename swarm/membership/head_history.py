"""The heads that led to a proved one, for those that look: a chart of a run's rounds, a page of who took part.

Each head names the one before it by its hash. So what led to a proved head needs no signature and no second witness: it
is checked by hashing alone, and one peer that keeps it is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from peer.catalogue.groups import PeerPenalized
from peer.errors import BarnraiseError, ProtocolViolation
from peer.net.host import Host
from swarm.protocol.head import Head
from swarm.protocol.messages import HEADS, AskHeads

PAGE_S: Final = 10.0  # for one answer


async def ask_history(
    host: Host, head: Head, peers: Sequence[str], *, after: bytes = b"", heads_max: int = 4096
) -> list[Head]:
    """Return the heads that led to the proved `head`, oldest first and without it, starting after the head whose hash
    is `after` (empty: all that are kept), at most `heads_max`.

    Peers are asked in turn until one leads to `after` or to the first head of all. If none does, the first returned
    head is not the successor of `after`: no peer that answers keeps the heads between. An answer that is no part of the
    chain is reported as the event `peer_penalized`, and the next peer is asked."""
    found = [head]
    for peer in dict.fromkeys(peers):
        try:
            while (room := heads_max + 1 - len(found)) and found[-1].previous not in (after, b""):
                asked = AskHeads(head.run_id, found[-1].previous, after)
                page = (await host.rpc.call(peer, HEADS, asked, timeout_s=PAGE_S)).body.heads
                if not page:
                    break
                for older in page[:room]:
                    if older.hash != found[-1].previous:
                        raise ProtocolViolation("heads that a peer shows are no chain")
                    found.append(older)
        except ProtocolViolation as error:
            host.events.emit(PeerPenalized(peer=peer, reason=str(error)))
        except BarnraiseError:
            continue
    return found[:0:-1]
