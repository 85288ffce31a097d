"""`peer plan`: what a run would take of a machine, without a network."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peer.identity import Identity
from peer.model.hub_config import hub_config
from swarm.run.features import QUANTIZED
from swarm.run.manifest import sign_manifest
from swarm.run.manifest_transfer import save_run_files
from tests.cli.support.typed import Peer, said, typed
from tests.peer.data.pages.data_sets import write_data_set
from tests.swarm.run.test_gate import AUTHORITY
from tests.swarm.run.test_manifest import make_manifest
from tests.swarm.run.test_served_model import served_model

LARGE = """
[run]
name = "one billion"
[model]
vocab_size = 32000
hidden_size = 2048
layers = 16
heads = 32
kv_heads = 8
intermediate_size = 8192
max_seq_len = 2048
[data]
seq_len = 2048
[inner]
lr = 1e-3
batch_size = {batch}
optimizer = "{optimizer}"
total_steps = 1000
[outer]
method = "diloco"
steps = 100
"""
CARD = ("--device", "rtx4090", "--json")


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Peer:
    return typed(monkeypatch, capsys)


def planned(peer: Peer, *arguments: str | Path) -> dict[str, Any]:
    ended = peer("plan", *arguments)
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert isinstance(found, dict)
    return found


def billion(folder: Path, batch: int = 1, optimizer: str = "adamw") -> Path:
    path = folder / "run.toml"
    path.write_text(LARGE.format(batch=batch, optimizer=optimizer))
    return path


@pytest.mark.parametrize(
    ("device", "memory", "optimizer", "bottleneck", "advice"),
    [
        ("24GB", "5GB", "adamw", "host memory", "5.8 GB of memory are needed, with the run's states in files, and 5"),
        ("16GB", "96GB", "adamw", "device memory", 'with [inner] optimizer = "adamw8bit" it fits'),
        ("12GB", "96GB", "adamw8bit", "device memory", "([pipeline] stages = 3, micro_batch = 1, recompute = true)"),
    ],
)
def test_a_billion_parameters_that_do_not_fit(
    peer: Peer, tmp_path: Path, device: str, memory: str, optimizer: str, bottleneck: str, advice: str
) -> None:
    run = billion(tmp_path, 8, optimizer)
    found = planned(peer, run, *CARD, "--device-memory", device, "--host-memory", memory)
    assert 1.03e9 < found["parameters"] < 1.05e9
    assert not found["fits"] and found["bottleneck"] == bottleneck
    assert any(advice in line for line in found["advice"]), found["advice"]


@pytest.mark.parametrize(("device", "memory", "optimizer"), [("24GB", "32GB", "adamw"), ("16GB", "16GB", "adamw8bit")])
def test_a_billion_parameters_fit_a_home_machine(
    peer: Peer, tmp_path: Path, device: str, memory: str, optimizer: str
) -> None:
    """In memory they took 76 GB."""
    run = billion(tmp_path, 8, optimizer)
    found = planned(peer, run, *CARD, "--device-memory", device, "--host-memory", memory)
    (stage,) = found["stages"]
    assert found["fits"] and stage["state"] == "disk" and stage["host_bytes"] < 3.1 * found["parameters"] + 3e9
    assert stage["disk"]["next state"] == 8 * found["parameters"]
    large = planned(peer, run, *CARD, "--device-memory", device, "--host-memory", "96GB")
    assert large["stages"][0]["state"] == "memory" and "next state" in large["stages"][0]["host"]


@pytest.mark.parametrize(
    ("device", "optimizer", "micro_batch", "recompute"),
    [("24GB", "adamw", 4, "full"), ("24GB", "adamw8bit", 2, "selective"), ("80GB", "adamw", 8, "none")],
)
def test_a_billion_parameters_fit_in_micro_batches_with_much_memory(
    peer: Peer, tmp_path: Path, device: str, optimizer: str, micro_batch: int, recompute: str
) -> None:
    run = billion(tmp_path, 8, optimizer)
    found = planned(peer, run, *CARD, "--device-memory", device, "--host-memory", "96GB")
    assert found["fits"] and (found["micro_batch"], found["recompute"]) == (micro_batch, recompute)


def test_split_weights_let_a_billion_parameters_fit_a_card_of_12_gib(peer: Peer, tmp_path: Path) -> None:
    """Of 12 GiB, 12.9 GB, and a machine with 16 GB; of 12 GB they leave 0.4 GB to be desired."""
    run = billion(tmp_path, 8, "adamw8bit")
    machine = ("--device-memory", "12.88GB", "--host-memory", "16GB")
    whole, split = (planned(peer, run, *CARD, *machine, "--weights", kind) for kind in ("fp32", "split"))
    assert not whole["fits"] and "a peer with --weights split has room for it" in whole["advice"]
    assert split["fits"] and split["micro_batch"] == 1 and split["recompute"] == "full"
    wide, narrow = (found["stages"][0]["device"] for found in (whole, split))
    count = split["parameters"]
    assert (wide["weights"], narrow["weights"]) == (4 * count, 3 * count)
    assert "16-bit copies of weights" in wide and not any("copies" in name for name in narrow)
    state = sum(narrow[name] for name in ("weights", "gradient", "inner optimizer"))
    assert 9.0 < state / count < 9.1
    assert 12e9 < split["stages"][0]["device_bytes"] < 12.5e9
    large = planned(peer, run, *CARD, "--host-memory", "16GB", "--weights", "split")
    assert (large["micro_batch"], large["recompute"]) == (2, "none")  # where fp32 weights recompute a part


@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [
        ("lion", (), "works with adamw and adamw8bit, and the run's optimizer is lion: use --weights fp32"),
        ("adamw", ("--cards", "2", "--layout", "ddp"), "is for one device, and there are 2: use --weights fp32"),
    ],
)
def test_what_cannot_be_split_is_said(
    peer: Peer, tmp_path: Path, optimizer: str, options: tuple[str, ...], words: str
) -> None:
    ended = peer("plan", billion(tmp_path, 8, optimizer), *CARD, "--weights", "split", *options)
    assert words in said(ended, 2)


@pytest.mark.parametrize(
    ("cards", "layout", "chosen", "fits", "micro_batch"),
    [
        (1, "auto", "one device", False, 1),
        (2, "auto", "fsdp:2", True, 4),
        (4, "auto", "fsdp:4", True, 2),  # of the step's eight sequences each card has two
        (4, "ddp", "ddp:4", False, 1),
        (4, "fsdp:2,tp", "fsdp:2,tp:2", True, 2),  # and nothing of them twice
    ],
)
def test_cards_share_a_model_that_none_of_them_holds(
    peer: Peer, tmp_path: Path, cards: int, layout: str, chosen: str, fits: bool, micro_batch: int
) -> None:
    options = ("--device-memory", "16GB", "--host-memory", "96GB", "--cards", str(cards), "--layout", layout)
    found = planned(peer, billion(tmp_path, 8), *CARD, *options)
    assert (found["layout"], found["fits"], found["micro_batch"]) == (chosen, fits, micro_batch)
    alone = planned(peer, billion(tmp_path, 8), *CARD, "--host-memory", "96GB")
    assert alone["recompute"] == "full"  # a fourth of its work
    assert 0.74 < found["step_s"] * cards / alone["step_s"] < 1.01
    more = any("a peer with 2 such cards holds it with --layout fsdp" in line for line in found["advice"])
    assert more == (cards == 1)


def test_the_sums_are_those_of_the_items(peer: Peer, tmp_path: Path) -> None:
    found = planned(peer, billion(tmp_path), *CARD, "--host-memory", "96GB", "--tokens", "20B")
    (stage,) = found["stages"]
    for place in ("device", "host", "disk"):
        assert sum(stage[place].values()) == pytest.approx(stage[f"{place}_bytes"])
    assert found["tokens"] == 20e9 and found["days"] > 0
    assert found["flops"] == pytest.approx(66e12) and found["link_bits_s"] == 100e6


def test_people_see_a_table(peer: Peer, tmp_path: Path) -> None:
    ended = peer("plan", billion(tmp_path), "--device", "rtx4090", "--host-memory", "5GB", "--link", "1gbit")
    assert ended.code == 0
    expected = (
        "does not fit",
        "states kept for joiners",
        "in files (--state disk)",
        "H for 10 % of waiting",
        "[pipeline] stages = ",
        "a leader of ",
    )
    for words in expected:
        assert words in ended.stdout
    last = ended.stdout.splitlines()[-1]
    assert last == "It does not fit; bottleneck: host memory. The lines above say what helps."


def test_the_leader_of_a_full_group_is_counted(peer: Peer, tmp_path: Path) -> None:
    run = billion(tmp_path)
    options = (*CARD, "--host-memory", "96GB")
    found = planned(peer, run, *options)
    assert found["leader_peers"] == min(64, found["group_most"])
    assert found["leader_bits_s"] == pytest.approx(8 * found["leader_bytes"] / found["round_s"])
    assert not any("the leader of" in line for line in found["advice"])
    run.write_text(run.read_text().replace('name = "one billion"', 'name = "few"\nmax_peers = 8'))
    few = planned(peer, run, *options)
    assert few["leader_peers"] == 8 and few["leader_bytes"] < found["leader_bytes"]
    text = LARGE.format(batch=1, optimizer="adamw").replace("= 2048", "= 64").replace("= 8192", "= 128")
    run.write_text(
        text.replace("heads = 32", "heads = 8").replace("= 32000", "= 256").replace("layers = 16", "layers = 1")
    )
    small = planned(peer, run, *options, "--link", "1mbit", "--peers", "64")
    assert any("the leader of 64 peers sends" in line and "max_peers" in line for line in small["advice"])


@pytest.mark.parametrize(
    "options",
    [("--device", "rtx4090"), ("--device", "cpu", "--flops", "1k"), ("--device", "h100", "--cards", "8")],
    ids=" ".join,
)
def test_the_widest_tables_have_80_columns_with_every_word_whole(
    peer: Peer, tmp_path: Path, options: tuple[str, ...]
) -> None:
    wide = ("--host-memory", "900GB", "--link", "1kbit", "--peers", "1024", "--tokens", "123456789T")
    ended = peer("plan", billion(tmp_path), *options, *wide)
    lines = ended.stdout.splitlines()
    assert ended.code == 0 and max(map(len, lines)) <= 80 and "\u2026" not in ended.stdout
    assert "a parameter" in ended.stdout and lines[-1].startswith("It fits; bottleneck: ")


def test_a_home_and_a_checkpoint_are_read_without_a_network(peer: Peer, tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = make_manifest(authority.peer_id)
    home, model = tmp_path / "home", tmp_path / "model"
    home.mkdir()
    save_run_files(home, sign_manifest(authority, manifest), b"")
    model.mkdir()
    shape = msgspec.structs.replace(manifest.model, vocab_size=300)
    (model / "config.json").write_bytes(msgspec.json.encode(hub_config(shape)))
    at_home, of_model = (planned(peer, folder, *CARD, "--host-memory", "32GB") for folder in (home, model))
    assert at_home["fits"] and of_model["fits"]
    assert at_home["steps"] == 10 and of_model["steps"] == 100
    assert of_model["parameters"] - at_home["parameters"] == (300 - 256) * shape.hidden_size


def test_a_served_model_is_counted_in_the_types_that_it_is_served_in(peer: Peer, tmp_path: Path) -> None:
    manifest = served_model(tokenizer="bytes", dtype="fp32", quantization="nf4", requires=(QUANTIZED,))
    save_run_files(tmp_path, sign_manifest(AUTHORITY, manifest), b"")
    machine = (tmp_path, "--serve", "--host-memory", "2GB")
    found = planned(peer, *machine, "--json")
    assert (found["layers"], found["dtype"], found["quantization"], found["fits"]) == (4, "fp32", "nf4", True)
    assert planned(peer, *machine, "--json", "--quantize", "nf4") == found
    shown = peer("plan", *machine)
    assert shown.code == 0 and "nf4" in shown.stdout and "serves the whole model" in shown.stdout
    assert "is served in nf4: drop --quantize" in said(peer("plan", *machine, "--quantize", "int8"), 2)
    assert "is served in fp32: drop --dtype" in said(peer("plan", *machine, "--dtype", "bf16"), 2)
    assert "is a served model, not a training run: add --serve" in said(peer("plan", tmp_path), 2)


def test_a_machine_without_figures_is_measured(peer: Peer, tmp_path: Path) -> None:
    authority = Identity.generate()
    save_run_files(tmp_path, sign_manifest(authority, make_manifest(authority.peer_id)), b"")
    measured = peer("plan", tmp_path, "--device", "cpu", "--json")
    found = json.loads(measured.stdout)
    assert found["device"] == "cpu" and found["flops"] > 0 and found["fits"]
    assert measured.stderr == "Measuring this machine's speed ...\n"
    assert not peer("plan", tmp_path, "--device", "cpu", "--json", "--flops", "1T").stderr


def test_a_downloaded_checkpoint_is_planned_by_its_id(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--some--model"
    folder = cached / "snapshots" / "1"
    folder.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    manifest = make_manifest(Identity.generate().peer_id)
    (folder / "config.json").write_bytes(msgspec.json.encode(hub_config(manifest.model)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    by_id, by_folder = (planned(peer, source, *CARD, "--host-memory", "32GB") for source in ("some/model", folder))
    assert by_id == by_folder and by_id["fits"]
    assert "fetch it with `hf download other/model`" in said(peer("plan", "other/model"), 2)


def test_a_measurement_is_told_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cli.main", "plan", str(billion(tmp_path, 8)), "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "Measuring this machine's speed ...\n"
        process.send_signal(signal.SIGINT)
        printed, told = process.communicate(timeout=60)
    assert (process.returncode, printed) == (130, "") and told.endswith("\nInterrupted.\n")
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("nowhere.toml",), "nowhere.toml does not exist"),
        (("--device", "gtx1"), "the card 'gtx1' is not known: choose one of rtx3060"),
        (("--host-memory", "32 apples"), "'32 apples' is no size: give a number above 0"),
        (("--link", "0mbit"), "'0mbit' is no rate"),
        (("--tokens", "-3"), "'-3' is no number"),
        (("--peers", "0"), "0 is not in the range"),
        (("--cards", "3", "--layout", "tp"), "model.heads is 32, which tp:3 does not divide"),
        (("--cards", "2", "--layout", "fsdp:4"), "is for 4 ranks and there are 2 devices"),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(peer: Peer, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    arguments = options if options[0].endswith(".toml") else (str(billion(tmp_path)), *options)
    assert words in said(peer("plan", *arguments), 2)


def test_a_folder_of_something_else_is_refused(peer: Peer, tmp_path: Path) -> None:
    assert "holds neither config.json nor a run" in said(peer("plan", tmp_path), 2)
    (tmp_path / "config.json").write_text("{}")
    assert said(peer("plan", tmp_path), 2)


def test_a_plan_for_a_named_card_loads_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from cli.main import group;"
        f"group.main(['plan', {str(billion(tmp_path))!r}, *{CARD!r}, '--host-memory', '32GB'], standalone_mode=False);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_a_data_set_is_counted_for_a_run_that_trains_on_it(peer: Peer, tmp_path: Path) -> None:
    index, train, _ = write_data_set(tmp_path / "data", seq_len=1023, windows=4096)
    run = tmp_path / "run.toml"
    text = (
        LARGE.format(batch=4, optimizer="adamw")
        .replace("32000", "256")
        .replace("max_seq_len = 2048", "max_seq_len = 1023")
    )
    run.write_text(
        text.replace("seq_len = 2048", 'seq_len = 1023\nsource = "pages"').replace("[model]", "rounds = 2\n[model]")
    )
    found = planned(peer, run, *CARD, "--data", tmp_path / "data", "--peers", "8")["data_set"]
    assert (found["sizes"]["root"], found["sizes"]["tokens"]) == (index.config.root, train.size)
    assert (found["epochs"], found["rounds_an_epoch"], found["tokens_left"]) == (2 * 3200 / 4096, 4096 / 3200, None)
    shown = peer("plan", run, "--device", "rtx4090", "--data", tmp_path / "data").stdout
    for part in (index.config.root[:16], "4,194,304", "8.4 MB, 3 pages", "epochs of the run", "67.1 MB"):
        assert part in shown, shown
    run.write_text(run.read_text().replace('"diloco"\nsteps = 100', '"allreduce"\nbatch = 256'))
    found = planned(peer, run, *CARD, "--data", tmp_path / "data", "--peers", "8")["data_set"]
    assert found["rounds_an_epoch"] == 4096 / 256  # of all peers together
    assert "data_set" not in planned(peer, run, *CARD)
    refused = peer("plan", "barnraise3abc", *CARD, "--data", tmp_path / "data")
    assert refused.code == 2 and "leave --data out" in refused.stderr


LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
}


def test_what_serving_takes_is_counted_by_the_type_of_the_blocks(peer: Peer, tmp_path: Path) -> None:
    """Llama 3.1 8B: 14.0 GB of blocks in bf16, a half in int8, 0.28 in nf4, which an 8 GB card holds whole."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    card = ("--serve", "--device-memory", "8GB", "--json")
    plain, eight, four = (
        planned(peer, tmp_path, *card, *options) for options in ((), ("--quantize", "int8"), ("--quantize", "nf4"))
    )
    assert [round(found["blocks_bytes"] / plain["blocks_bytes"], 2) for found in (eight, four)] == [0.5, 0.28]
    assert plain["embedding_bytes"] + plain["head_bytes"] == 2 * 2 * 128256 * 4096
    assert four["fits"] and four["servers"] == 1 and four["tokens_kept"] >= 8192
    assert not eight["fits"] and not plain["fits"] and plain["servers"] > eight["servers"] > 1
    assert plain["token_bytes"] == 2 * 2 * 8 * 128 * 32
    said = peer("plan", tmp_path, "--serve", "--quantize", "nf4", "--device-memory", "8GB")
    assert "serves the whole model" in said.stdout and "6.0 GB" in said.stdout
    said = peer("plan", tmp_path, "--serve", "--host-memory", "2GB")
    assert said.code == 0 and "does not fit" in said.stdout
    saved = LLAMA_8B | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert planned(peer, tmp_path, *card)["quantization"] == "int8"
    assert "quantized in int8: drop --quantize" in peer("plan", tmp_path, *card, "--quantize", "nf4").stderr
    assert "counts only beside --serve" in peer("plan", tmp_path, "--quantize", "nf4").stderr
    assert "--peers and --serve were both given" in peer("plan", tmp_path, *card, "--peers", "4").stderr
