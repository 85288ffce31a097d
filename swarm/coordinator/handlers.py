"""The calls that a coordinator answers. Each goes to the authority of the group that it names."""

from __future__ import annotations

from collections.abc import Sequence

from peer.errors import ProtocolViolation, RoundError
from peer.net.address_prefix import prefix_of
from peer.net.host import Host
from peer.net.method import Call
from swarm.coordinator.authority import Authority
from swarm.protocol import messages as say


class CoordinatorHandlers:
    """Serves the authorities of all groups of a run, from its construction on."""

    def __init__(self, host: Host, authorities: Sequence[Authority]) -> None:
        self._host = host
        self._of = {authority.group: authority for authority in authorities}
        if len(authorities) == 1:
            self._of[""] = authorities[0]
        host.rpc.register(say.HEAD_REPORT, self._on_head_report)
        host.rpc.register(say.REQUEST_JOIN, self._on_request_join)
        host.rpc.register(say.NEED_REGROUP, self._on_need_regroup)
        host.rpc.register(say.BELIEVED, self._on_believed)

    def _named(self, group: str) -> Authority:
        if group not in self._of:
            raise RoundError("this run has no such group: look its manifest up again")
        return self._of[group]

    async def _on_head_report(self, call: Call[say.AskHead]) -> say.HeadReport:
        return self._named(call.body.group).report()

    async def _on_request_join(self, call: Call[say.JoinRequest]) -> say.HeadReport:
        if call.body.member.peer != call.peer:
            raise ProtocolViolation("a join request names another peer than its sender")
        authority = self._named(call.body.group)
        self._host.learn(call.peer, call.body.addresses, told_by=call.peer)
        authority.request_join(call.body, prefix_of(self._host.remote_ip(call.peer)))
        return authority.report()

    async def _on_need_regroup(self, call: Call[say.AskHead]) -> say.HeadReport:
        authority = self._named(call.body.group)
        authority.look()
        return authority.report()

    async def _on_believed(self, call: Call[say.AskBelieved]) -> say.Believed:
        authority = self._named(call.body.group)
        believed = [name for name, round in call.body.heads[:1] if authority.history.believes(call.peer, name, round)]
        believed += [name for name, round in call.body.heads[1:] if authority.history.vouches(name, round)]
        return say.Believed(authority.head.position, tuple(believed))
