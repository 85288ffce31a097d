"""`peer` for `test_nat`, where the Go daemon of `peer relay` gets a minute to start: other tests share the machine."""

from __future__ import annotations

from cli.main import main
from peer.net import relay_daemon

if __name__ == "__main__":
    relay_daemon._START_S = 60.0  # type: ignore[misc]
    main()
