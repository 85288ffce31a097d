"""Which requests name this machine as their host."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.web.own_host import names_this_machine
from swarm.web.page_files import page_routes


@pytest.mark.parametrize("host", ["127.0.0.1:8081", "localhost", "LOCALHOST:1", "[::1]:8081", "[::1]", "10.0.0.7:80"])
def test_own_names(host: str) -> None:
    assert names_this_machine(host, "10.0.0.7")


@pytest.mark.parametrize("host", ["", "evil.example", "127.0.0.1.evil.example:80", "evil.example:127", "10.0.0.8"])
def test_other_names(host: str) -> None:
    assert not names_this_machine(host, "10.0.0.7")


def test_a_page_is_its_files_and_nothing_else(tmp_path: Path) -> None:
    for name in ("index.html", "a.js", "notes.txt", "b.css~"):
        (tmp_path / name).write_text("x")
    assert sorted(route.path for route in page_routes(tmp_path)) == ["/", "/a.js"]
