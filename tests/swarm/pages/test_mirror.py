"""Pages from a web server: in ranges, checked, and with one sentence where it cannot be."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from peer.data.pages.folder import BuiltPages, read_page
from peer.data.pages.index import encode_index
from peer.errors import ConfigError, NetworkError
from swarm.pages.mirror import Mirror, check_mirror
from tests.peer.data.pages.data_sets import write_data_set


class Files(BaseHTTPRequestHandler):
    """The files of `folder`, in ranges if `ranges`; `/moved/` redirects."""

    folder: Path
    ranges = True

    def do_GET(self) -> None:
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.end_headers()
            return
        if self.path.startswith("/away/"):
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            return
        path = self.folder / self.path.rpartition("/")[2]
        if not path.is_file():
            self.send_error(404)
            return
        data, asked = path.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.ranges:
            data = data[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206 if asked and self.ranges else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def server(folder: Path, ranges: bool = True) -> Iterator[str]:
    handler = type("Handler", (Files,), {"folder": folder, "ranges": ranges})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltPages:
    folder = tmp_path_factory.mktemp("set")
    write_data_set(folder, seq_len=4095, windows=2 * 512 + 3)
    return BuiltPages.open(folder)


async def test_index_and_pages_come_in_ranges_also_after_a_redirect(built: BuiltPages) -> None:
    with server(built.folder) as url:
        for at in (f"{url}/sets/one/", f"{url}/moved/"):
            mirror = Mirror(at, built.index.config)
            assert await mirror.fetch_index() == encode_index(built.index)
            for page in range(built.index.pages):
                assert await mirror.fetch_page(built.index, page) == read_page(built.index, page, built.find(page))


async def test_a_server_without_ranges_gives_what_a_file_begins_with(built: BuiltPages) -> None:
    with server(built.folder, ranges=False) as url:
        mirror = Mirror(url, built.index.config)
        assert await mirror.fetch_page(built.index, 0) == read_page(built.index, 0, built.find(0))
        with pytest.raises(NetworkError, match="does not answer ranges"):
            await mirror.fetch_page(built.index, 1)


async def test_other_bytes_and_missing_files_are_refused(built: BuiltPages, tmp_path: Path) -> None:
    write_data_set(tmp_path, seq_len=4095, windows=3, seed=8)
    with server(tmp_path) as url:
        mirror = Mirror(url, built.index.config)
        with pytest.raises(NetworkError, match=r"train-00000.pages cannot be read \(it ends after 24576 bytes\)"):
            await mirror.fetch_page(built.index, 0)
        with pytest.raises(NetworkError, match="is not the page 3 of the data set"):
            await Mirror(url, built.index.config).fetch_page(built.index, 3)
    with pytest.raises(NetworkError, match="check --data-url"):
        await mirror.fetch_index()


async def test_a_redirect_to_a_file_of_this_machine_is_not_followed(built: BuiltPages) -> None:
    with server(built.folder) as url, pytest.raises(NetworkError, match="cannot be read"):
        await Mirror(f"{url}/away", built.index.config).fetch_index()


def test_only_web_addresses_are_taken() -> None:
    for url in ("ftp://example.org/x", "/home/me", "http://a b", "file:///etc", "http://a\n"):
        with pytest.raises(ConfigError, match="give an http:// or https:// URL"):
            check_mirror(url)
