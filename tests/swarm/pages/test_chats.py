"""A run that names a folder of conversations: the coordinator builds the data set, in which answers alone count."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import trio
from tokenizers import Tokenizer as HubTokenizer
from transformers import BatchEncoding, PreTrainedTokenizerFast

from peer.config import ModelConfig
from peer.data.pages.folder import BuiltPages
from peer.data.tokenizer import load_tokenizer
from peer.model.huggingface import export_pretrained
from peer.model.layout import init_flat
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.manifest_transfer import load_run_files
from tests.peer.data.building.builds import small_tokenizer
from tests.peer.data.building.test_conversations import CHATML, SPECIAL, TAGGED, talks
from tests.support.peer_process import POLL_S
from tests.swarm.support.swarm_harness import RUN_TOML, open_swarm

SEQ_LEN = 31
BASE = ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=128, max_seq_len=64, vocab_size=320)
Counted = list[tuple[int, bool]]
"""Ids, and whether they count in the loss."""


def tuning(base: Path, chats: Path) -> str:
    """Return a RUN.toml that tunes the checkpoint in `base` to the conversations in `chats`."""
    before, _, rest = RUN_TOML.partition("[model]")
    inner = rest[rest.index("[inner]") :]
    data = f'[data]\nseq_len = {SEQ_LEN}\nvalidation_share = 0.1\nchats = "{chats}"\n\n'
    return f'{before}[model]\nbase = "{base}"\n\n[adapter]\nrank = 4\nalpha = 8\n\n{data}{inner}'


def write_chats(folder: Path, made: Sequence[list[dict[str, str]]]) -> None:
    """Write one half as messages, the other in the form of ShareGPT."""
    folder.mkdir()
    half, names = len(made) // 2, {"user": "human", "assistant": "gpt"}
    shared = [[{"from": names[each["role"]], "value": each["content"]} for each in talk] for talk in made[half:]]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in made[:half]))
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"conversations": talk}) for talk in shared))


def stream_of(folder: Path, part: str) -> Counted:
    """Return the tokens of a data set's part, read by the format's definition."""
    index = BuiltPages.open(folder).index
    data = b"".join(path.read_bytes() for path in sorted(folder.glob(f"{part}-*.pages")))
    rows = np.frombuffer(data, np.uint8).reshape(-1, index.row_bytes)
    id_bytes = (index.seq_len + 1) * np.dtype(index.dtype).itemsize
    ids = rows[:, :id_bytes].copy().view(np.dtype(index.dtype).newbyteorder("<"))
    bits = np.unpackbits(rows[:, id_bytes:], axis=1, count=index.seq_len + 1, bitorder="little")
    return [*zip(ids.flatten().tolist(), bits.flatten().astype(bool).tolist(), strict=True)]


def taken_apart(stream: Counted, documents: list[Counted]) -> int:
    """Return how many documents a stream is made of, one after the other, the last one perhaps cut."""
    left, at, count = [*documents], 0, 0
    while at < len(stream):
        found = next(one for one in left if stream[at : at + len(one)] == one[: len(stream) - at])
        left.remove(found)
        at, count = at + len(found), count + 1
    return count


@pytest.mark.process
async def test_a_run_of_a_chat_folder_trains_on_the_answers_that_transformers_marks(tmp_path: Path) -> None:
    """Members fetch what the coordinator has built; a coordinator that comes back needs the conversations no more."""
    base, chats, made = tmp_path / "base", tmp_path / "chats", talks(160)
    (tmp_path / "bpe").mkdir()
    tokenizer = small_tokenizer(tmp_path / "bpe", SPECIAL)
    export_pretrained(base, BASE, init_flat(BASE, seed=1), load_tokenizer(str(tokenizer)))
    (base / "chat_template.jinja").write_text(TAGGED)
    write_chats(chats, made)

    theirs = PreTrainedTokenizerFast(tokenizer_object=HubTokenizer.from_file(str(tokenizer)), chat_template=TAGGED)
    end = [(id, False) for id in theirs.encode("\n\n")]
    expected = list[Counted]()
    for talk in made:
        found = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        assert isinstance(found, BatchEncoding)
        expected.append([*zip(found["input_ids"], map(bool, found["assistant_masks"]), strict=True), *end])

    async with open_swarm(tmp_path, run=tuning(base, chats), steps=6) as swarm:
        home = swarm.coordinator.home
        (folder,) = (home / "chats").iterdir()
        counts = [taken_apart(stream_of(folder, part), expected) for part in ("train", "held-out")]
        assert min(counts) > 1 and len(made) - 10 < sum(counts) <= len(made), "but for windows that are not full"
        kept = load_run_files(home)
        assert kept is not None
        manifest = open_manifest(kept[0])
        assert isinstance(manifest, Manifest)
        assert manifest.data.pages == BuiltPages.open(folder).index.config and manifest.data.seq_len == SEQ_LEN
        peers = [swarm.join("first"), swarm.join("second")]
        await swarm.committed(1, *peers)
        with trio.fail_after(60):
            while (home / "unbegun").exists():  # until the coordinator knows that the run has begun
                await trio.sleep(POLL_S)
        swarm.coordinator.kill()
        await swarm.coordinator.wait_exit()
        shutil.rmtree(chats)
        (base / "chat_template.jinja").write_text(CHATML)
        swarm.restart(swarm.coordinator)
        await swarm.committed(max(peer.round for peer in peers) + 3, *peers)
        losses = [fact.fields["loss"] for fact in peers[0].commits]
        assert losses[-1] < losses[0]
        assert [*(home / "chats").iterdir()] == [folder], "it built nothing again"
