"""What is refused before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.coordinate import template
from peer.errors import ConfigError
from peer.events import EventLog
from peer.identity import Identity
from swarm.founding import found
from swarm.run_config import parse_run_config


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("# max_peers = 64", "max_peers = 1024", "max_peers is 1024: .* lower max_peers, topk or rank"),
        ("vocab_size = 256", "vocab_size = 200", "vocab_size is 200"),
    ],
)
def test_a_run_that_could_not_work_is_not_founded(old: str, new: str, said: str, tmp_path: Path) -> None:
    head, _, _ = template().replace("hidden_size = 64", "hidden_size = 512").partition("[outer]\n")
    sparse = '[outer]\nmethod = "demo"\ntopk = 512\n'
    with pytest.raises(ConfigError, match=said):
        found(tmp_path, parse_run_config(head.replace(old, new) + sparse), Identity.generate(), EventLog())
    assert not list(tmp_path.iterdir())
