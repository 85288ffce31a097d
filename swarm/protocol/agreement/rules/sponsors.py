"""Sponsors of a head's peers: keys that vouch for them, and how many each may admit, directly or through others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from swarm.protocol.head import Sponsor, Sponsorship


class Sponsors:
    """The sponsorships of one head, in the making."""

    def __init__(self, sponsorships: Iterable[Sponsorship] = ()) -> None:
        self._of: dict[str, dict[str, int]] = {}
        for entry in sponsorships:
            self._of.setdefault(entry.peer, {})[entry.sponsor.key] = entry.sponsor.guests

    def of(self, peer: str) -> tuple[Sponsor, ...]:
        """Return those that vouch for a peer."""
        return tuple(Sponsor(key, guests) for key, guests in self._of.get(peer, {}).items())

    def bring_in(self, peer: str, sponsors: Collection[Sponsor], inside: Collection[str]) -> bool:
        """Note that these vouch for a peer, if each may bring it in, in addition to those `inside` that it has brought
        in. Return whether they may."""
        others = [self._of.get(other, {}) for other in inside if other != peer]
        if any(sum(sponsor.key in brought for brought in others) >= sponsor.guests for sponsor in sponsors):
            return False
        self._of[peer] = {sponsor.key: sponsor.guests for sponsor in sponsors}
        return True

    def among(self, inside: Collection[str]) -> tuple[Sponsorship, ...]:
        """Return the sponsorships of those peers, in order."""
        return tuple(sorted(Sponsorship(sponsor, peer) for peer in inside for sponsor in self.of(peer)))
