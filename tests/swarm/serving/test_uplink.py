"""The measured rate of an uplink."""

from __future__ import annotations

from swarm.serving.uplink import BUSY_S, UplinkRate


def test_only_a_stretch_that_waits_for_the_link_counts() -> None:
    uplink = UplinkRate()
    uplink.sent(1 << 20, BUSY_S / 2)  # buffers have taken it
    assert uplink.bytes_s == 0
    uplink.sent(2_500_000, 1.0)
    assert uplink.bytes_s == 2_500_000
    for _ in range(30):
        uplink.sent(1_000_000, 1.0)
    assert 1_000_000 <= uplink.bytes_s < 1_010_000
