"""What is announced on the local network, and what is taken from it."""

from __future__ import annotations

import pytest

from peer.identity import Identity
from peer.net.lan.announcement import (
    ADDRESSES_MAX,
    SERVICE,
    announced_peer,
    dialled,
    instance_name,
    local_addresses,
    tag_of,
)

RUN, OTHER = "r" * 32, "s" * 32
ANN, BO = (Identity(bytes([number]) * 32).peer_id for number in (1, 2))  # the same in each worker


def test_a_name_tells_the_peer_to_those_who_know_the_run() -> None:
    name = instance_name(RUN, ANN)
    assert announced_peer(name, RUN) == ANN and announced_peer(name, OTHER) is None
    assert len(name.removesuffix(f".{SERVICE}").encode()) == 63 and RUN not in name


def test_a_tag_is_of_no_use_for_another_peer() -> None:
    """So who hears a name can neither announce keys of its own nor see which peers are in one run."""
    assert announced_peer(instance_name(RUN, ANN).replace(ANN, BO), RUN) is None
    assert tag_of(RUN, ANN) != tag_of(RUN, BO)


@pytest.mark.parametrize(
    "name",
    [
        "", SERVICE, f".{SERVICE}", f"-{tag_of(RUN, '')}.{SERVICE}", f"no peer-{tag_of(RUN, 'no peer')}.{SERVICE}",
        f"{ANN}.{SERVICE}", f"{ANN}-.{SERVICE}", f"{ANN}-\udc80.{SERVICE}", f"{ANN}-{'é' * 5}.{SERVICE}",
        "x" * 9999 + instance_name(RUN, ANN), instance_name(RUN, ANN).upper(),
    ],
)  # fmt: skip
def test_any_other_name_is_none(name: str) -> None:
    assert announced_peer(name, RUN) is None


def test_only_addresses_of_private_networks_are_announced() -> None:
    listening = [f"/ip4/{ip}/tcp/4001" for ip in ("8.8.8.8", "100.64.0.1", "192.168.0.2", "10.0.0.3")]
    assert local_addresses([*listening, "/ip6/fd00::2/tcp/4001", "/ip4/10.0.0.9/tcp/4002"]) == (
        ("192.168.0.2", "10.0.0.3", "fd00::2"), 4001,
    )  # fmt: skip
    assert local_addresses(listening[:2]) == ((), 0)
    assert len(local_addresses([f"/ip4/10.0.0.{n}/tcp/1" for n in range(99)])[0]) == ADDRESSES_MAX


def test_a_name_leads_into_no_other_network() -> None:
    own = ("192.168.0.2", "fd00::2")
    assert dialled(["192.168.0.3", "fd00::3", "192.168.0.3"], 4001, own) == (
        "/ip4/192.168.0.3/tcp/4001", "/ip6/fd00::3/tcp/4001",
    )  # fmt: skip
    others = ["127.0.0.1", "10.0.0.1", "8.8.8.8", "100.64.0.1", "::1", "fe80::1%eth0", "169.254.0.1", "", "no address"]
    assert dialled(others, 4001, own) == ()
    assert dialled(["192.168.0.3"], 0, own) == dialled(["192.168.0.3"], 1 << 16, own) == ()
    assert len(dialled([f"192.168.0.{n}" for n in range(99)], 1, own)) == ADDRESSES_MAX
