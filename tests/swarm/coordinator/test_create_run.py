"""What is refused when a run is created, and the state that it starts with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trio
from tokenizers import Tokenizer, models, pre_tokenizers

from cli.templates import template, with_settings
from peer.checkpoint.hash_tree import hash_state
from peer.data.tokenizer import ByteTokenizer
from peer.errors import CheckpointError, ConfigError
from peer.events import EventLog
from peer.identity import Identity
from peer.ipc.span import Span
from peer.model.huggingface import export_pretrained
from peer.model.layout import FlatLayout, init_flat
from swarm.coordinator.create_run import create_run, reload
from swarm.protocol.roster_room import peers_that_fit
from swarm.run.agreement import schedule_of
from swarm.run.config import RunConfig, parse_run_config
from swarm.run.home import Home
from swarm.run.manifest import open_manifest
from swarm.run.manifest_transfer import load_run_files
from swarm.run.tokenizer import end_of_text
from swarm.training.saved_models import newest_model

CUT = with_settings(
    with_settings(template(), "model", {"layers": 6, "tie_embeddings": False}), "pipeline", {"stages": 3}
)


@pytest.mark.parametrize(
    ("section", "setting", "said"),
    [
        ("run", {"max_peers": 1024}, "max_peers is 1024: .* lower max_peers, topk or rank"),
        ("model", {"vocab_size": 200}, "vocab_size is 200"),
    ],
)
def test_a_run_that_could_not_work_is_not_created(
    section: str, setting: dict[str, int], said: str, tmp_path: Path
) -> None:
    head, _, _ = with_settings(template(), "model", {"hidden_size": 512}).partition("[outer]\n")
    sparse = '[outer]\nmethod = "demo"\ntopk = 512\n'
    with pytest.raises(ConfigError, match=said):
        create_run(
            tmp_path, parse_run_config(with_settings(head, section, setting) + sparse), Identity.generate(), EventLog()
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bundled", [False, True])
def test_a_message_of_many_slices_is_committed_to_in_bundles(
    bundled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest says so, for all peers of the run, and software that does not know it refuses the run."""
    if bundled:
        monkeypatch.setattr("swarm.coordinator.create_run.BUNDLES_MAX", 5)
        monkeypatch.setattr("swarm.protocol.round_schedule.BUNDLES_MAX", 5)
    trio.run(created, tmp_path, parse_run_config(template()))
    run_files = load_run_files(tmp_path)
    assert run_files is not None
    manifest = open_manifest(run_files[0])
    assert manifest.requires == (*(("bundles",) if bundled else ()), "shares_by_link")
    assert schedule_of(manifest, 0).bundles(12).count == (4 if bundled else 12)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_group_that_no_roster_holds_is_not_created(stages: int, tmp_path: Path) -> None:
    """The error has both numbers and the remedy; with the number that it names the run is created."""
    text = with_settings(with_settings(template(), "model", {"tie_embeddings": False}), "run", {"max_peers": 1024})
    text = with_settings(text, "pipeline", {"stages": stages}) if stages > 1 else text
    identity = Identity.generate()
    with pytest.raises(ConfigError, match=r"max_peers is 1024: .* 768 KiB .* lower max_peers to \d+, or") as error:
        create_run(tmp_path / "a", parse_run_config(text), identity, EventLog())
    most = int(str(error.value).partition("lower max_peers to ")[2].partition(",")[0])
    assert peers_that_fit(12, stages > 1) <= most < 1024
    run = parse_run_config(with_settings(text, "run", {"max_peers": most}))
    trio.run(trio.to_thread.run_sync, create_run, tmp_path / "b", run, identity, EventLog())
    assert (tmp_path / "b").is_dir()
    with pytest.raises(ConfigError, match=f"those of {most} peers"):
        run = parse_run_config(with_settings(text, "run", {"max_peers": most + 1}))
        create_run(tmp_path / "c", run, identity, EventLog())


async def created(home: Path, run: RunConfig) -> Identity:
    """Create a run in a coordinator's home."""
    identity = Identity.load_or_create(Home(home).identity)
    await trio.to_thread.run_sync(create_run, home, run, identity, EventLog())
    return identity


async def test_each_stage_starts_with_its_part_of_the_model(tmp_path: Path) -> None:
    run = parse_run_config(CUT)
    identity = await created(tmp_path, run)
    run_files = load_run_files(tmp_path)
    assert run_files is not None and run.model is not None
    manifest = open_manifest(run_files[0])
    states = reload(tmp_path, manifest, identity, EventLog())
    assert manifest.stages == 3 and [tuple(state.tensors) for state in states] == [("theta", "momentum")] * 3
    whole = init_flat(run.model, run.run.seed)
    assert torch.equal(torch.cat([state.tensors["theta"] for state in states]), whole)
    for state, (first, end), root in zip(states, manifest.cuts, manifest.genesis, strict=True):
        assert len(state.tensors["theta"]) == FlatLayout.of(run.model, Span(first, end, run.model.layers)).numel
        assert not state.tensors["momentum"].any()
        assert hash_state(list(state.tensors.values())).root == state.tree.root == root
    assert {path.name for path in tmp_path.glob("stage-*")} == {"stage-0", "stage-1", "stage-2"}
    assert not Home(tmp_path).checkpoints.exists()
    assert torch.equal(newest_model([tmp_path]).theta, whole)


async def test_a_missing_stage_is_named(tmp_path: Path) -> None:
    identity = await created(tmp_path, parse_run_config(CUT))
    lost = Home(tmp_path).stage(1, 3).checkpoints
    lost.rename(tmp_path / "elsewhere")
    run_files = load_run_files(tmp_path)
    assert run_files is not None
    with pytest.raises(CheckpointError, match="gone or damaged"):
        reload(tmp_path, open_manifest(run_files[0]), identity, EventLog())
    with pytest.raises(
        CheckpointError, match=r"stage 1 of 3 is missing .*: add the home of a peer of each, .*HOME_OF_STAGE_1"
    ):
        newest_model([tmp_path])
    (tmp_path / "elsewhere").rename(lost.parent.parent / "stage-1" / "checkpoints")
    Home(tmp_path).stage(0, 3).checkpoints.rename(tmp_path / "mixed-up")
    lost.rename(Home(tmp_path).stage(0, 3).checkpoints)
    with pytest.raises(CheckpointError, match="stages 0, 1 of 3 are missing"):
        newest_model([tmp_path])  # checkpoints of another stage do not count


async def test_a_whole_model_has_one_folder(tmp_path: Path) -> None:
    await created(tmp_path, parse_run_config(template()))
    assert Home(tmp_path).checkpoints.is_dir() and not list(tmp_path.glob("stage-*"))
    assert len(newest_model([tmp_path]).parts) == 1


@pytest.mark.parametrize("stages", [1, 2])
async def test_a_pretrained_model_is_cut_as_well(stages: int, tmp_path: Path) -> None:
    config = parse_run_config(template()).model
    assert config is not None and config.tie_embeddings
    weights = init_flat(config, 7)
    export_pretrained(tmp_path / "hub", config, weights, ByteTokenizer())
    before, _, rest = template().partition("[model]")
    text = f"{before}[model]\ninit = {str(tmp_path / 'hub')!r}\n{rest[rest.index('[data]') :]}"
    await created(tmp_path / "home", parse_run_config(f"{text}\n[pipeline]\nstages = {stages}\n"))
    kept = newest_model([tmp_path / "home"])
    assert kept.manifest.stages == stages
    if stages == 1:
        assert torch.equal(kept.theta, weights)
        return
    views, given = (FlatLayout.of(c).views(f) for c, f in ((kept.manifest.model, kept.theta), (config, weights)))
    assert not kept.manifest.model.tie_embeddings
    assert torch.equal(views["lm_head.weight"], given["model.embed_tokens.weight"])
    assert all(torch.equal(views[name], value) for name, value in given.items())


@pytest.mark.parametrize(
    ("named", "of_checkpoint", "found"),
    [
        (None, "</s>", "</s>"),
        (None, "<eos>", None),  # the checkpoint says so and its tokenizer does not know it
        (None, "", None),
        ("", "</s>", ""),
        ("</s>", "", "</s>"),
    ],
)
def test_a_run_ends_texts_with_the_token_of_its_checkpoint_or_its_own(
    named: str | None, of_checkpoint: str, found: str | None
) -> None:
    assert end_of_text(ending_with(named), with_token("</s>"), of_checkpoint) == found


def test_a_token_that_the_tokenizer_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"end_of_text '<eos>' is no single token .*: name one that is"):
        end_of_text(ending_with("<eos>"), with_token("</s>"), "")
    with pytest.raises(ConfigError, match=r"leave \[data\] end_of_text out"):
        end_of_text(ending_with("</s>"), b"", "")


async def test_answers_of_a_run_end_with_the_token_that_ends_its_texts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(with_token("</s>"))
    text = with_settings(template(), "tokenizer", {"source": str(tmp_path / "tokenizer.json")})
    text = with_settings(with_settings(text, "model", {"vocab_size": 257}), "data", {"end_of_text": "</s>"})
    await created(tmp_path / "home", parse_run_config(text))
    run_files = load_run_files(tmp_path / "home")
    assert run_files is not None
    rules = open_manifest(run_files[0]).text
    assert (rules.stops, rules.eos) == ((256,), "</s>")


def ending_with(token: str | None) -> RunConfig:
    named = {} if token is None else {"end_of_text": token}
    return parse_run_config(with_settings(template(), "data", named))


def with_token(token: str) -> bytes:
    """A tokenizer.json of bytes and one special token."""
    bpe = Tokenizer(models.BPE(vocab={chr(256 + byte): byte for byte in range(256)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.add_special_tokens([token])
    return bpe.to_str().encode()
