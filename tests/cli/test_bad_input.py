"""Wrong input to a run: each case ends with one sentence and its exit code."""

from __future__ import annotations

import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.commands.quickstart import MARK, _claim, _prepare, run_toml
from cli.homes import default_home
from cli.templates import template, with_settings
from optim.config import METHODS
from peer.config import ModelConfig, RopeScaling
from peer.data.tokenizer import ByteTokenizer
from peer.errors import ConfigError
from peer.identity import Identity
from peer.model.huggingface import export_pretrained
from peer.model.layout import init_flat
from swarm.run.config import _fields_at, parse_run_config, read_run_config
from swarm.run.home import Home
from swarm.run.invite import Invite
from tests.cli.support.typed import Peer, said

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ADVANCED = "# ---- Advanced"
RUN_ID = "abcdefgh234567abcdefgh234567abcd"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def invite_to(port: int) -> str:
    authority = Identity(bytes(32)).peer_id  # the same in each worker
    return str(Invite(RUN_ID, authority, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{authority}",)))


def test_the_template_shows_the_true_defaults() -> None:
    as_written = parse_run_config(template())
    _, advanced = template().split(ADVANCED)
    spelt_out, section, shown = template(), "", 0
    for line in advanced[: advanced.index('# method = "streaming"')].splitlines():
        section = line[3:-1] if line.startswith("# [") else section
        if section == "adapter":  # which needs a base
            continue
        found = re.match(r"# (\w+) = (.+?)(?: +#.*)?$", line)
        if found and section and found[1] not in ("init", "base", "quantize", "steps"):
            spelt_out = with_settings(spelt_out, section, {found[1]: tomllib.loads(f"x = {found[2]}")["x"]})
            shown += 1
    assert shown > 35 and parse_run_config(spelt_out) == as_written


def test_the_template_begins_with_what_everybody_sets() -> None:
    basic, _ = template().split(ADVANCED)
    assert len(re.findall(r"^\w+ = ", basic, re.MULTILINE)) <= 18
    assert not re.findall(r"^\w", template().split(ADVANCED)[1], re.MULTILINE)


def test_settings_are_written_into_their_section() -> None:
    text = with_settings(template(), "run", {"name": 'a "b" # c', "seed": 7})
    text = with_settings(with_settings(text, "outer", {"steps": 5}), "codec", {"up": "int4"})
    config = parse_run_config(with_settings(text, "run", {"name": "again"}))
    assert (config.run.name, config.run.seed, config.outer.steps, config.codec.up) == ("again", 7, 5, "int4")


def section_of(text: str, name: str, method: str) -> str:
    """Return that section of the template; of [outer], the lines of that method."""
    if name != "outer":
        sections = re.findall(rf"^(?:# )?\[{name}\](.*?)(?=^(?:# )?\[\w+\]|\Z)", text, re.MULTILINE | re.DOTALL)
        return "\n".join(sections)
    section = text.split(ADVANCED)[1]
    return next(part for part in section.split("\n\n") if f'# method = "{method}"' in part)


@pytest.mark.parametrize("method", METHODS)
def test_the_template_has_every_setting(method: str) -> None:
    for name in _fields_at((), method):
        written = re.findall(r"^(?:# )?(\w+)(?: =|:)", section_of(template(), name, method), re.MULTILINE)
        assert set(_fields_at((name,), method)) <= set(written), name
    assert all(f"{field}=" in template() for field in RopeScaling.__struct_fields__)


def test_quickstart_fits_the_schedule_to_its_rounds() -> None:
    config = parse_run_config(run_toml(6))
    assert config.run.rounds == 6 and config.inner.total_steps == 6 * config.outer.steps


def test_init_writes_the_template_once_and_names_the_run_after_the_file(peer: Peer, tmp_path: Path) -> None:
    path = tmp_path / "Bücher 2.toml"
    assert peer("coordinate", "--init", path).code == 0
    assert path.read_text(encoding="utf-8") == template().replace("embedded example", "Bücher 2")
    assert read_run_config(path).run.name == "Bücher 2"
    assert "exists already" in said(peer("coordinate", "--init", path), 2)
    assert "1 to 64 printable letters" in said(peer("coordinate", "--init", tmp_path / ("x" * 65 + ".toml")), 2)


def test_malformed_toml_names_line_and_field(peer: Peer, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(template().replace("seq_len = 128", 'seq_len = "long"'))
    line = template()[: template().index("\nseq_len")].count("\n") + 2
    sentence = said(peer("coordinate", path, "--home", tmp_path / "home"), 2)
    assert f"{path}, line {line}: [data] seq_len: expected int, got str" in sentence
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("invite", "words"),
    [
        ("hello", "'hello' is no invite, no file and no name"),
        ("coordinator/invit", "'coordinator/invit' names no file that can be read: .* correct the path"),
        (invite_to(1)[:-3], "damaged|cut off"),
        ("barnraise4abc", "ask for a new invite"),
    ],
)
def test_corrupt_invites(peer: Peer, tmp_path: Path, invite: str, words: str) -> None:
    for arguments in (("join", invite, "--home", tmp_path / "h"), ("status", invite), ("doctor", invite)):
        assert re.search(words, said(peer(*arguments), 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "cpu", "--devices", "cpu:2"), "--devices is for several, --device for one"),
        (("--layout", "fsdp"), "--layout was given without --devices"),
        (("--devices", "0,0"), "the devices '0,0' are not understood: name GPUs by their numbers"),
        (("--devices", "cpu:2", "--compile"), "--compile was given with several --devices"),
    ],
)
def test_devices_that_contradict_each_other(peer: Peer, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    assert words in said(peer("join", invite_to(1), "--home", tmp_path / "h", *options), 2)
    assert not (tmp_path / "h").exists()


def test_an_argument_that_is_not_utf8(peer: Peer, tmp_path: Path) -> None:
    sentence = said(peer("join", invite_to(1), "--home", tmp_path, "--name", "J\udcfcrgen"), 2)
    assert r"J\udcfcrgen" in sentence and "UTF-8" in sentence


def test_a_home_that_cannot_be_written(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sentence = said(peer("join", invite_to(1), "--home", tmp_path / "file" / "home"), 5)
    assert "cannot write to" in sentence and "--home" in sentence


def test_a_regroup_without_a_coordinator(peer: Peer, tmp_path: Path) -> None:
    assert "is not the home of a coordinator" in said(peer("regroup", "--home", tmp_path), 2)
    assert "--without ann is not a peer id" in said(peer("regroup", "--home", tmp_path, "--without", "ann"), 2)


def test_a_notice_goes_to_web_addresses_only(peer: Peer, tmp_path: Path) -> None:
    sentence = said(peer("coordinate", "--home", tmp_path, "--notify", "mailto:ann@example.com"), 2)
    assert "--notify mailto:ann@example.com" in sentence and "https://" in sentence


def test_a_home_with_a_too_long_name(peer: Peer, tmp_path: Path) -> None:
    """The system says nothing about it, as about a folder that may not be read."""
    home, run = tmp_path / ("x" * 300), tmp_path / "r.toml"
    run.write_text(template())
    assert "cannot write to" in said(peer("join", invite_to(1), "--home", home), 5)
    assert "cannot write to" in said(peer("coordinate", run, "--home", home), 5)
    assert "cannot write to" in said(peer("quickstart", "--home", home), 5)
    assert "cannot be read" in said(peer("export", "--home", home, "--out", tmp_path / "o"), 5)
    assert "cannot be read" in said(peer("status", "--home", home), 2)
    found = peer("doctor", "--home", home)
    assert found.code == 5 and "FAILURE  home" in found.stdout, found
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]


def test_a_home_whose_log_cannot_be_written(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    assert "events.jsonl cannot be written" in said(peer("join", invite_to(1), "--home", tmp_path), 5)
    (tmp_path / "events.jsonl").rmdir()
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    assert "events.jsonl is a link" in said(peer("join", invite_to(1), "--home", tmp_path), 5)
    assert not (tmp_path / "elsewhere").exists()


def test_the_home_of_an_unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_HOME", "~nobody-of-that-name/b")
    with pytest.raises(ConfigError, match="set HOME, or give --home"):
        default_home("peer")


def test_an_export_to_an_unwritable_folder_fetches_nothing(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "model", tmp_path / ("x" * 300)):
        sentence = said(peer("export", invite_to(1), "--out", out), 5)  # before the network is used
        assert f"cannot write to {out}" in sentence and "--out" in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_temporary_folder_that_cannot_be_made(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))  # where Python keeps what it made of TMPDIR
    for arguments in (("status", invite_to(1)), ("export", invite_to(1), "--out", tmp_path / "model")):
        assert "TMPDIR" in said(peer(*arguments), 5)
    assert not (tmp_path / "model").exists(), "an export that fails leaves nothing behind"


def test_damaged_homes(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "invite").write_bytes(b"\xff\xfe\x00")
    assert "is damaged" in said(peer("status", "--home", tmp_path / "a"), 2)
    (tmp_path / "b" / "manifest.msgpack").mkdir(parents=True)
    (tmp_path / "b" / "invite").write_text(invite_to(1))
    assert "manifest.msgpack cannot be copied" in said(peer("status", "--home", tmp_path / "b"), 5)


@pytest.mark.parametrize(
    "address", ["garbage", "/ip4/1.2.3.4", "/ip4/1.2.3.4/udp/4001", "/ip4/1.2.3.4/tcp/0", "/ip4/0.0.0.0/tcp/4001"]
)
def test_an_announced_address_that_cannot_be_dialled(peer: Peer, tmp_path: Path, address: str) -> None:
    options = ("--home", tmp_path / "h", "--listen", "/ip4/127.0.0.1/tcp/0", "--announce", address)
    assert f"--announce {address}" in said(peer("join", invite_to(1), *options), 2)
    found = peer("doctor", *options)
    assert found.code == 2 and f"--announce {address}" in found.stdout and "can take part" not in found.stdout


def test_a_relay_without_a_peer_id(peer: Peer, tmp_path: Path) -> None:
    options = ("--home", tmp_path / "h", "--listen", "/ip4/127.0.0.1/tcp/0", "--relay", "/ip4/1.2.3.4/tcp/4001")
    assert "names no peer" in said(peer("join", invite_to(1), *options), 2)
    found = peer("doctor", *options)
    assert found.code == 2 and "names no peer" in found.stdout


def test_a_coordinator_whose_home_is_in_use(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "invite").write_text(invite_to(1))
    with Home(tmp_path).locked():
        ended = peer("coordinate", "--home", tmp_path)
    assert "another peer is running" in said(ended, 5)
    assert "The run is kept" not in ended.stderr


def test_a_port_in_use(peer: Peer, tmp_path: Path, taken_port: int) -> None:
    listen = f"/ip4/127.0.0.1/tcp/{taken_port}"
    sentence = said(peer("join", invite_to(1), "--home", tmp_path / "h", "--listen", listen), 5)
    assert f"port {taken_port} is in use" in sentence and "--listen" in sentence


def test_export_and_status_need_a_source(peer: Peer, tmp_path: Path) -> None:
    assert "either INVITE or --home" in said(peer("status"), 2)
    assert "either INVITE or --home" in said(peer("export", "--out", tmp_path / "o"), 2)
    assert "is no peer's home" in said(peer("export", "--home", tmp_path, "--out", tmp_path / "o"), 6)
    assert "is no peer's home" in said(peer("status", "--home", tmp_path), 2)


def test_quickstart_leaves_other_folders_alone(peer: Peer, tmp_path: Path) -> None:
    precious = tmp_path / "run.toml"
    precious.write_text(template())
    assert "not empty and not a quickstart's" in said(peer("quickstart", "--home", tmp_path), 2)
    assert precious.read_text() == template()


def test_a_second_quickstart_leaves_the_first_one_alone(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / MARK).touch()
    (tmp_path / "peer-1").mkdir()
    with Home(tmp_path).locked():
        assert "another peer is running" in said(peer("quickstart", "--home", tmp_path), 5)
    assert (tmp_path / "peer-1").is_dir()


def test_quickstart_removes_only_what_an_earlier_one_left(tmp_path: Path) -> None:
    _claim(tmp_path / "q")
    _prepare(tmp_path / "q", 4)
    (tmp_path / "q" / "peer-1").mkdir()
    (tmp_path / "q" / "peer-1" / "events.jsonl").touch()
    (tmp_path / "q" / "notes.txt").touch()
    _prepare(tmp_path / "q", 6)
    assert {path.name for path in (tmp_path / "q").iterdir()} == {MARK, "run.toml", "notes.txt"}


def test_a_checkpoint_or_tokenizer_that_does_not_fit_the_run(peer: Peer, tmp_path: Path) -> None:
    model = ModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate_size=16, max_seq_len=64)
    export_pretrained(tmp_path / "hub", model, init_flat(model, 0), ByteTokenizer())
    text = template()
    sized = text[text.index("hidden_size") : text.index("[data]")]
    path = tmp_path / "r.toml"
    path.write_text(text.replace(sized, f'init = "{tmp_path / "hub"}"\n'))
    sentence = said(peer("coordinate", path, "--home", tmp_path / "a"), 2)
    assert "does not fit the model: seq_len is 128" in sentence
    path.write_text(
        with_settings(with_settings(text, "model", {"vocab_size": 100}), "tokenizer", {"source": str(tmp_path / "hub")})
    )
    assert "the tokenizer has 256 ids" in said(peer("coordinate", path, "--home", tmp_path / "b"), 2)
    (tmp_path / "hub" / "tokenizer.json").unlink()
    path.write_text(text.replace(sized, f'init = "{tmp_path / "hub"}"\n').replace("seq_len = 128", "seq_len = 64"))
    sentence = said(peer("coordinate", path, "--home", tmp_path / "d"), 2)
    assert "has no tokenizer.json: convert" in sentence and 'source = "bytes" trains on bytes' in sentence
    assert "has no tokenizer.json: copy it from the model" in said(peer("serve", "--model", tmp_path / "hub"), 6)
    path.write_text(text.replace(sized, 'init = "nowhere"\n'))
    assert "nowhere" in said(peer("coordinate", path, "--home", tmp_path / "c"), 6)
