"""A run of a data set: what the manifest says of it, and which folders are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio
from blake3 import blake3

from cli.templates import template, with_settings
from peer.data.pages.folder import BuiltPages
from peer.data.pages.index import encode_index
from peer.data.tokenizer import ByteTokenizer
from peer.errors import ConfigError
from peer.events import EventLog
from peer.identity import Identity
from swarm.coordinator.data_set import open_data_set, with_data_set
from swarm.coordinator.reopen import create_or_reopen
from swarm.run.config import RunConfig, parse_run_config
from swarm.run.features import MARKS_IN_STAGES, PAGES, features_of
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.sections import RunRules
from tests.peer.data.pages.data_sets import write_data_set
from tests.swarm.run.test_manifest import make_manifest

SEQ_LEN = 31


def run_of(**data: str | int | float) -> RunConfig:
    return parse_run_config(with_settings(template(), "data", {"source": "pages", "seq_len": SEQ_LEN, **data}))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data_set(tmp_path / "data", seq_len=SEQ_LEN, windows=50)
    return tmp_path / "data"


async def made(home: Path, run: RunConfig | None, data: Path | None) -> Manifest:
    """Create the run of a coordinator's home, or open it again."""
    home.mkdir(exist_ok=True)
    identity = Identity.load_or_create(home / "identity.key")
    created = await trio.to_thread.run_sync(create_or_reopen, home, run, identity, EventLog(), data)
    return open_manifest(created[0])


async def test_the_manifest_names_the_data_set_and_requires_to_know_of_pages(tmp_path: Path, data: Path) -> None:
    manifest = await made(tmp_path / "home", run_of(), data)
    index = BuiltPages.open(data).index
    assert manifest.data.pages == index.config and manifest.tokenizer == index.tokenizer == "bytes"
    assert PAGES in manifest.requires
    assert (await made(tmp_path / "home", None, None)).run_id == manifest.run_id
    assert (await made(tmp_path / "home", run_of(), data)).run_id == manifest.run_id
    assert open_data_set(None, manifest.data.pages) is None
    library = open_data_set(data, manifest.data.pages)
    assert library is not None and library.has_all


async def test_another_data_set_is_another_run(tmp_path: Path, data: Path) -> None:
    manifest = await made(tmp_path / "home", run_of(), data)
    write_data_set(tmp_path / "other", seq_len=SEQ_LEN, windows=50, seed=9)
    with pytest.raises(ConfigError, match="of another data set than the run's"):
        open_data_set(tmp_path / "other", manifest.data.pages)
    replaced = await made(tmp_path / "home", run_of(), tmp_path / "other")  # it has not begun
    assert replaced.run_id != manifest.run_id
    (tmp_path / "home" / "unbegun").unlink()
    with pytest.raises(ConfigError, match=r"another \[data\] than RUN.toml"):
        await made(tmp_path / "home", run_of(), data)


async def test_the_tokenizer_is_that_of_the_data_set(tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    ByteTokenizer().save(folder)
    content = (folder / "tokenizer.json").read_bytes()
    index = msgspec.structs.replace(BuiltPages.open(data).index, tokenizer=blake3(content).hexdigest())
    (data / "index.msgpack").write_bytes(encode_index(index))
    (data / "tokenizer.json").write_bytes(content)
    assert (await made(tmp_path / "home", run_of(), data)).tokenizer == index.tokenizer
    named = parse_run_config(
        with_settings(template(), "data", {"source": "pages", "seq_len": SEQ_LEN}) + '\n[tokenizer]\nsource = "bytes"\n'
    )
    with pytest.raises(ConfigError, match=r"was made by the tokenizer .* and the model's is bytes"):
        with_data_set(named, data)


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match='source is "pages": name its folder with --data'):
        with_data_set(run_of(), None)
    with pytest.raises(ConfigError, match=r'RUN.toml has .data. source = "stdlib": set it to "pages"'):
        with_data_set(parse_run_config(template()), data)
    with pytest.raises(ConfigError, match="has sequences of 31 tokens and the run of 30"):
        with_data_set(run_of(seq_len=30), data)
    with pytest.raises(ConfigError, match=r"index\.msgpack cannot be read"):
        with_data_set(run_of(), tmp_path)
    index, _, _ = write_data_set(tmp_path / "large", seq_len=SEQ_LEN, windows=5, vocab_size=300)
    assert index.vocab_size == 300
    with pytest.raises(ConfigError, match="has ids below 300 and the model only 256"):
        with_data_set(run_of(), tmp_path / "large")
    with pytest.raises(ConfigError, match="trains on no data set"):
        open_data_set(data, None)


def test_marks_in_stages_are_required_of_the_software(tmp_path: Path) -> None:
    """They are in the manifest by the size of a window."""
    for counting, stages, needed in ((None, 2, False), (0.5, 1, False), (0.5, 2, True)):
        folder = tmp_path / f"{counting}-{stages}"
        write_data_set(folder, seq_len=SEQ_LEN, windows=5, counting=counting)
        data = with_data_set(run_of(), folder).data
        assert data.has_marks == (counting is not None)
        assert (MARKS_IN_STAGES in features_of(RunRules(name="test"), data, stages)) == needed


def test_a_manifest_that_contradicts_itself_is_refused(data: Path) -> None:
    index = BuiltPages.open(data).index
    plain = msgspec.to_builtins(make_manifest(Identity.generate().peer_id), builtin_types=(bytes,))
    pages = msgspec.to_builtins(index.config)
    for said, source, named, required in (
        ("pages are not named where", "pages", None, (PAGES,)),
        ("pages are not named where", "stdlib", pages, (PAGES,)),
        ("requires lacks a feature", "pages", pages, ()),
    ):
        content = plain | {"data": {"seq_len": SEQ_LEN, "source": source, "pages": named}, "requires": required}
        with pytest.raises(msgspec.ValidationError, match=said):
            msgspec.msgpack.decode(msgspec.msgpack.encode(content), type=Manifest)


def test_run_toml_names_no_data_set_itself() -> None:
    root = "0" * 64
    with pytest.raises(ConfigError, match=r"\[data\] pages: pages is no setting of a run: set source = .pages."):
        parse_run_config(template().replace("[data]", f'[data]\npages = {{root = "{root}"}}', 1))
