"""Wrong input about a pipeline: one sentence with the remedy, and the exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from cli.templates import template, with_settings
from peer.checkpoint.generation import StateGeneration
from peer.config import ModelConfig
from peer.events import EventLog
from peer.identity import Identity
from swarm.coordinator.create_run import _model
from swarm.placement.stages import layout_of, open_store, vectors_of
from swarm.run.config import parse_run_config
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest, sign_manifest
from swarm.run.manifest_transfer import save_run_files
from swarm.run.sections import PipelineConfig
from tests.cli.support.typed import Peer, said
from tests.swarm.run.test_manifest import make_manifest

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")


def manifest_of(identity: Identity, stages: int, name: str = "test") -> Manifest:
    model = ModelConfig(
        hidden_size=32, layers=3, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64, tie_embeddings=False
    )
    manifest = make_manifest(identity.peer_id)
    return msgspec.structs.replace(
        manifest,
        run=msgspec.structs.replace(manifest.run, name=name),
        model=model,
        pipeline=PipelineConfig(stages=stages),
        cuts=((0, 3),) if stages == 1 else ((0, 1), (1, 2), (2, 3)),
        genesis=(bytes(32),) * stages,
    )


def guest(home: Path, stages: int) -> tuple[str, Path]:
    """Return an invite, and a home that has the run's manifest already, so that no network is needed."""
    authority = Identity.generate()
    manifest = manifest_of(authority, stages)
    home.mkdir()
    save_run_files(home, sign_manifest(authority, manifest), b"")
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{authority.peer_id}"
    return str(Invite(manifest.run_id, authority.peer_id, (address,))), home


@pytest.mark.parametrize(
    ("stages", "options", "words"),
    [
        (3, "--role full", "--role full, but the model is cut into 3 stages: choose --role stage"),
        (3, "--stage 3", "there is no stage 3: choose 0 to 2, or leave --stage out"),
        (3, "--role feeder --stage 1", "a feeder has no stage: leave out either"),
        (
            3,
            "--memory-limit 0.0001",
            r"--memory-limit is 0\.0001 GB and the smallest stage needs .*: raise it, or join",
        ),
        (3, "--memory-limit 0.0001 --stage 2", "and stage 2 needs .* GB: raise it, or join with --role feeder"),
        (3, "--memory-limit 0.503 --stage 2", "and stage 2 needs .* GB: raise it, or leave --stage out"),
        (1, "--stage 1", "every peer holds the whole model: leave out --role and --stage"),
        (1, "--role feeder", "every peer holds the whole model: leave out --role and --stage"),
        (1, "--memory-limit 0.0001", "and the model needs .* GB: raise it"),
    ],
)
def test_roles_that_do_not_fit_the_run(peer: Peer, tmp_path: Path, stages: int, options: str, words: str) -> None:
    invite, home = guest(tmp_path / "home", stages)
    assert re.search(words, said(peer("join", invite, "--home", home, *LOOPBACK, *options.split()), 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("quickstart --stages 0", "0 is not in the range"),
        ("quickstart --stages three", "'three' is no whole number"),
        ("quickstart --stages 3 --peers 4", "3 stages need 5 peers here, as some will fail: raise --peers"),
        ("quickstart --rounds 5", "5 rounds are too few for the peer that is added: give --rounds 6 or more"),
        (
            "quickstart --stages 2 --rounds 7",
            "7 rounds are too few for the peer that is added: give --rounds 8 or more",
        ),
        ("join INVITE --stage -1", "-1 is not in the range"),
        ("join INVITE --memory-limit 0", "0.0 is not in the range"),
        ("join INVITE --memory-limit inf", "inf is not in the range"),
        ("join INVITE --memory-limit nan", "nan is no finite number"),
        ("join INVITE --upload-limit inf", "inf is not in the range"),
        ("join INVITE --download-limit 1e9", "1000000000.0 is not in the range"),
        ("join INVITE --upload-limit nan", "nan is no finite number"),
        ("join INVITE --role leader", "'leader' is not one of"),
    ],
)
def test_impossible_options(peer: Peer, tmp_path: Path, options: str, words: str) -> None:
    assert words in said(peer(*options.split(), "--home", tmp_path / "home"), 2)
    assert not (tmp_path / "home").exists()


UNTIED = with_settings(template(), "model", {"tie_embeddings": False})


@pytest.mark.parametrize(
    ("text", "section", "words"),
    [
        (
            UNTIED,
            "stages = 3",
            r"line \d+: \[pipeline\] stages: .* 2 blocks make at most 2 stages; lower stages",
        ),
        (UNTIED, "stages = 0", r"\[pipeline\] stages: .* between 1 \(no pipeline\)"),
        (UNTIED, "stages = 2\nmicro_batch = 3", r"\[pipeline\] micro_batch: .* must divide \[inner\] batch_size \(8\)"),
        (UNTIED, 'stages = 2\nactivations = "int2"', r"\[pipeline\] activations: .*int2"),
        (UNTIED, 'stages = "two"', r"\[pipeline\] stages: expected int, got str"),
        (UNTIED, "stages = ", "is not valid TOML: line .*correct that line"),
        (UNTIED, "stage = 2", "unknown field: write stages"),
        (template(), "stages = 2", r"\[model\] tie_embeddings: .* set it to false"),
    ],
)
def test_wrong_pipeline_sections(peer: Peer, tmp_path: Path, text: str, section: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"{text}\n[pipeline]\n{section}\n")
    assert re.search(words, said(peer("coordinate", path, "--home", tmp_path / "home"), 2))
    assert not (tmp_path / "home").exists()


def test_the_documented_pipeline_settings_are_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run" / "pipelines.md").read_text()
    text = template()
    for block in re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if block.startswith("["):
            text += f"\n{block}"
            continue
        for line in block.splitlines():
            key, value = line.partition("#")[0].split(" = ")
            assert re.search(rf"^(# )?{key} = ", text, re.MULTILINE), line
            text = with_settings(text, "model", {key: json.loads(value)})
    assert parse_run_config(text).pipeline == PipelineConfig(stages=3)


async def home_with_checkpoints(home: Path, manifest: Manifest, authority: Identity, stages: list[int]) -> Path:
    """Make a home that holds a checkpoint of these stages."""
    home.mkdir()
    save_run_files(home, sign_manifest(authority, manifest), b"")
    identity = Identity.load_or_create(Home(home).identity)
    run = parse_run_config(template())
    _, theta, _ = _model(run, None)
    for stage in stages:
        layout = layout_of(manifest, stage)
        named = {name: theta[: layout.numel].clone() for name in vectors_of(manifest, stage)}
        store = open_store(Home(home), manifest, stage, identity, EventLog())
        store.prepare()
        assert await store.save(stage + 4, b"", StateGeneration(named), layout)
    return home


async def test_export_names_missing_stages(peer: Peer, tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = manifest_of(authority, 3)
    first = await home_with_checkpoints(tmp_path / "first", manifest, authority, [0])
    empty = await home_with_checkpoints(tmp_path / "empty", manifest, authority, [])
    other = manifest_of(authority, 3, "another")
    stranger = await home_with_checkpoints(tmp_path / "stranger", other, authority, [1, 2])
    out = ("--out", tmp_path / "model")
    sentence = said(peer("export", "--home", first, "--home", empty, *out), 6)
    assert f"stages 1, 2 of 3 are missing ({first} holds stage 0; {empty} holds none)" in sentence
    assert f"`peer export --home {first} --home HOME_OF_STAGE_1 --home HOME_OF_STAGE_2 --out DIR`" in sentence
    assert "or export from an INVITE" in sentence
    assert "belongs to another run" in said(peer("export", "--home", first, "--home", stranger, *out), 6)
    assert "no intact checkpoint yet" in said(peer("export", "--home", empty, *out), 6)


async def test_export_names_stages_that_are_behind(peer: Peer, tmp_path: Path) -> None:
    authority = Identity.generate()
    home = await home_with_checkpoints(tmp_path / "home", manifest_of(authority, 3), authority, [0, 1, 2])
    ended = peer("export", "--home", home, "--out", tmp_path / "model")
    assert ended.code == 0 and "from its 3 stages at rounds 4, 5, 6," in ended.stdout
    assert "Behind the others: stage 0. Add the --home of a peer with a newer checkpoint of it." in ended.stdout
