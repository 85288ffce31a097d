"""The card of an export: what others said in it is neither Markdown nor YAML, and only an export is uploaded."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from huggingface_hub import constants

from peer.config import DataConfig
from peer.corpus_facts import CorpusFacts
from peer.errors import ConfigError, NetworkError
from peer.identity import Identity
from swarm.client.hub_upload import check_push, push
from swarm.client.model_card import TrainedFacts, model_card
from swarm.run.sections import RunRules
from tests.peer.data.pages.data_sets import write_data_set
from tests.swarm.run.test_manifest import make_manifest

AUTHORITY = Identity.generate()
HOSTILE = "<script> [x](http://e) `\u202e# |\\"
FACTS = TrainedFacts(
    rounds=(4,),
    states=("ab" * 32,),
    tokens=12_345,
    losses=(0.5, 9.0, 0.7),
    corpora=(
        CorpusFacts(
            files=3,
            train_bytes=2000,
            held_out_bytes=9,
            train_tokens=1000,
            held_out_tokens=4,
            truncated=False,
            account="",
        ),
    ),
)


def test_a_card_has_a_front_matter_and_what_is_known() -> None:
    rules = RunRules(name="tiny", rounds=9, license="apache-2.0")
    manifest = make_manifest(AUTHORITY.peer_id, run=rules, base_model="people/model-1")
    _, front, body = model_card(manifest, FACTS, "org/name").split("---\n", 2)
    assert front.splitlines()[:2] == ['license: "apache-2.0"', 'base_model: "people/model-1"']
    assert "pipeline_tag: text-generation" in front and "- diloco" in front
    for fact in ("# tiny", "| 4 of 9 |", "| 12,345 |", "0.7000 nats a byte, as the median of 3 peers", "1,000 tokens"):
        assert fact in body
    assert f"`{manifest.run_id}`" in body and 'from_pretrained("org/name")' in body


def test_a_card_names_the_data_set_of_all_peers(tmp_path: Path) -> None:
    index, train, held_out = write_data_set(tmp_path, seq_len=63, windows=100)
    index = msgspec.structs.replace(index, source="[the web](x)", license="cc0-1.0")
    data = DataConfig(seq_len=63, source="pages", pages=index.config)
    manifest = make_manifest(AUTHORITY.peer_id, data=data, requires=("pages",))
    whole = model_card(manifest, replace(FACTS, data_set=index))
    sizes = f"| {train.size:,} to train on, {held_out.size:,} held out |"
    for fact in (f"`{index.config.root}`", sizes, "| 100 to train on, 4 held out |", r"\[the web\]\(x\)", "cc0"):
        assert fact in whole
    assert "one data set that is named above" in whole and "files" not in whole and "text of its own" not in whole
    unread = model_card(manifest, FACTS)
    assert index.config.root in unread and sizes in unread and "documents" not in unread and "license" not in unread


def test_a_name_is_only_letters() -> None:
    card = model_card(make_manifest(AUTHORITY.peer_id, run=RunRules(name=HOSTILE.replace("\u202e", ""))), FACTS)
    (title,) = [line for line in card.splitlines() if line.startswith("# ")]
    assert title == r"# \<script\> \[x\]\(http\:\/\/e\) \`\# \|\\"


def test_only_words_that_are_known_to_be_harmless_reach_the_front_matter() -> None:
    for bad in ("MIT\nbase_model: x", "a: b", "x" * 65, "-"):
        with pytest.raises(ValueError, match="license is"):
            RunRules(name="tiny", license=bad)
    for bad in ("people", "people/model\n", "/etc/passwd", "../x", "a" * 97 + "/b"):
        with pytest.raises(ValueError, match="base_model is no id"):
            make_manifest(AUTHORITY.peer_id, base_model=bad)
    manifest = make_manifest(AUTHORITY.peer_id)
    old = msgspec.to_builtins(manifest, builtin_types=(bytes,))
    del old["base_model"], old["run"]["license"]
    again = msgspec.convert(old, type(manifest))
    assert (again.base_model, again.run.license) == ("", "")
    assert "license" not in model_card(again, FACTS) and "base_model" not in model_card(again, FACTS)


ASKED: list[tuple[str, bytes]] = []


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as an upload takes. `org/forbidden` is another's, and one token is unknown."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        ASKED.append((path, content))
        if self.headers.get("Authorization") != "Bearer hf_right":
            self._send(401, {"error": "Invalid credentials"})
        elif "forbidden" in path or b"forbidden" in content:
            self._send(403, {"error": "Forbidden"})
        elif path == "/api/repos/create":
            self._send(200, {"url": f"{constants.ENDPOINT}/org/name"})
        elif "/preupload/" in path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(content)["files"]
            ]
            self._send(200, {"files": files})
        elif "/commit/" in path:
            self._send(
                200, {"commitUrl": f"{constants.ENDPOINT}/org/name/commit/1", "commitOid": "1" * 40, "success": True}
            )
        else:
            self._send(200, {"errors": [], "warnings": []})

    def do_GET(self) -> None:
        self._send(200, {"id": "org/name", "sha": "0" * 40, "siblings": []})

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, said: dict[str, Any]) -> None:
        content = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ASKED.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    for name in ("README.md", "config.json", "model.safetensors", "notes.txt", ".barnraise-export"):
        (tmp_path / name).write_text(f"content of {name}")
    return tmp_path


@pytest.mark.usefixtures("hub")
def test_an_export_is_uploaded_and_nothing_beside_it(export: Path) -> None:
    check_push("org/name")
    assert push(export, "org/name", private=True, message="Round 4 of 'tiny'") == f"{constants.ENDPOINT}/org/name"
    made = next(json.loads(content) for path, content in ASKED if path == "/api/repos/create")
    assert (made["organization"], made["name"]) == ("org", "name")
    assert made.get("private") or made.get("visibility") == "private"
    commit = next(content for path, content in ASKED if "/commit/" in path)
    lines = [json.loads(line) for line in commit.splitlines()]
    assert {line["value"]["path"] for line in lines if line["key"] == "file"} == {
        "README.md", "config.json", "model.safetensors",
    }  # fmt: skip
    assert lines[0]["value"]["summary"] == "Round 4 of 'tiny'"


@pytest.mark.usefixtures("hub")
def test_what_stops_an_upload_is_one_sentence(export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"may not write to org/forbidden .* the export is in {tmp_path}"):
        push(export, "org/forbidden", private=True, message="x")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="does not know this machine's token: log in with `hf auth login`"):
        push(export, "org/name", private=True, message="x")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NetworkError, match=r"cannot be pushed .* where there is a network; the"):
        push(export, "org/name", private=True, message="x")
    with pytest.raises(ConfigError, match="write ORG/NAME"):
        check_push("name")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"no token .* `hf auth login`, or set HF_TOKEN"):
        check_push("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="while HF_HUB_OFFLINE is set"):
        check_push("org/name")
