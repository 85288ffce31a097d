"""`peer quickstart --tune` whose tuning comes to too little, from end to end."""

from __future__ import annotations

from pathlib import Path
from subprocess import DEVNULL, PIPE

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.demo.tuning import STYLE, TunedSample
from peer.data.pages.corpus import PagedCorpus
from peer.data.pages.folder import BuiltPages
from tests.support.forking.forked import ForkedProcess

pytestmark = [pytest.mark.process, pytest.mark.soak]
BATCHES, ROWS = 8, 8
"""A peer's validation: batches of RUN.toml's size."""


def untuned_loss(model: Path, data: Path) -> float:
    """Return the held-out loss of a model's answers in nats a byte, by transformers."""
    pages = BuiltPages.open(data)
    corpus = PagedCorpus(pages.index, pages.index.config.root, [pages])
    decoder = AutoModelForCausalLM.from_pretrained(model).eval()
    total, count = 0.0, 0
    for tokens in corpus.held_out_batches(ROWS, BATCHES):
        counts, ids = tokens[:, 1:] >= 0, torch.where(tokens < 0, -1 - tokens, tokens)
        with torch.no_grad():
            logits = decoder(ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        total += float(losses[counts.flatten()].sum())
        count += int(counts.sum())
    return total / count / corpus.bytes_per_token


def test_a_tuning_without_the_style_ends_with_a_sentence_and_a_code(tmp_path: Path) -> None:
    """The loss has fallen a little: from that of the model before any step, which round 0 has."""
    home = tmp_path / "q"
    words = ("quickstart", "--home", str(home), "--peers", "3", "--rounds", "6", "--tune")
    program = "tests.support.forking.untaught_quickstart"
    with ForkedProcess(program, *words, stdout=PIPE, stderr=PIPE, stdin=DEVNULL, text=True) as process:
        out, err = process.communicate(timeout=1000)
    assert process.returncode == 7, err[-2000:]
    last = err.strip().splitlines()[-1]
    assert last == f"peer: the tuned model has not learned the style: read the logs in {home / 'tuned'}"
    tuned = msgspec.json.decode((home / "tuned.json").read_bytes(), type=TunedSample)
    before, after = tuned.losses
    assert after < before and not tuned.after.startswith(STYLE) and "before: " in out
    assert before == pytest.approx(untuned_loss(home / "model", home / "tuned" / "data"), rel=2e-2)
