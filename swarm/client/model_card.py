"""The model card of an export: README.md with the front matter that the Hugging Face Hub reads.

Names and numbers in it were said by others: text is bounded and put in code, or its marks are escaped, so that it is
neither Markdown nor YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from peer.config import DataConfig, PagesConfig
from peer.corpus_facts import CorpusFacts
from peer.data.pages.index import PageIndex
from peer.footprint.parameters import parameter_count
from peer.plain_text import plain
from swarm.run.manifest import Manifest

CARD: Final = "README.md"
WRITTEN_MARK: Final = "<!-- written by peer export: remove this line to keep your own text -->"
_COMMON: Final = "State and tokens are those of the last commit, which the run's members have signed."
_OWN: Final = "State and tokens are those of one peer: in a run of this method each has weights of its own."
_OWN_TEXT: Final = (
    "Each peer reads text of its own, and measures the held-out loss on some of it: no other peer has checked what",
    "it says of either.",
)
_ONE_DATA_SET: Final = (
    "All peers train on the one data set that is named above, by the hash of its index, and measure the held-out loss",
    "on a part of it. No other peer has checked the losses that a peer reports.",
)
_KINDS: Final = (
    "A decoder of the Llama family, trained by volunteers' machines with Barnraise.",
    "A LoRA adapter, trained by volunteers' machines with Barnraise beside a frozen base of the Llama family.",
    "A decoder of the Llama family, tuned by volunteers' machines with Barnraise: an adapter merged into its base.",
)
_MARKS: Final = re.compile(r"([!-/:-@\[-`{-~])")  # all of ASCII's signs


@dataclass(frozen=True)
class TrainedFacts:
    """What an export knows of its training, beside the manifest."""

    rounds: tuple[int, ...]
    """Of each stage."""
    states: tuple[str, ...]
    """The hash of each stage's state, in hex."""
    tokens: int = 0
    """Of all peers together, as the heads say; 0 where none does."""
    losses: tuple[float, ...] = ()
    """Held-out losses, in nats a byte, as single peers reported them last."""
    corpora: tuple[CorpusFacts, ...] = ()
    """The corpora that the exported homes have read."""
    data_set: PageIndex | None = None
    """The index of the run's data set, if an exported home has it."""


def model_card(manifest: Manifest, facts: TrainedFacts, source: str = ".", is_merged: bool = False) -> str:
    """Return the text of README.md. `source`: the folder or the Hub's id from which the model is loaded. `is_merged`:
    whether an adapter is written with its base, as one model."""
    return "\n".join(
        [*_front_matter(manifest, is_merged), "", WRITTEN_MARK, "", *_body(manifest, facts, source, is_merged), ""]
    )


def _front_matter(manifest: Manifest, is_merged: bool) -> list[str]:
    said = {"license": manifest.run.license, "base_model": manifest.base_model}
    return [
        "---",
        *(f"{name}: {json.dumps(value)}" for name, value in said.items() if value),  # a JSON string is one of YAML
        f"library_name: {'peft' if _is_adapter(manifest, is_merged) else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags:",
        "- barnraise",
        f"- {manifest.outer.__struct_config__.tag}",
        "---",
    ]


def _is_adapter(manifest: Manifest, is_merged: bool) -> bool:
    return manifest.base is not None and not is_merged


def _body(manifest: Manifest, facts: TrainedFacts, source: str, is_merged: bool) -> list[str]:
    return [
        f"# {_escaped(manifest.run.name)}",
        "",
        _KINDS[0 if manifest.base is None else 1 + is_merged],
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _rows(manifest, facts)),
        "",
        _COMMON if manifest.outer.has_common_state else _OWN,
        *(_OWN_TEXT if manifest.data.pages is None else _ONE_DATA_SET),
        "",
        "```python",
        *_loading(manifest, source, is_merged),
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(source)})",
        "```",
    ]


def _loading(manifest: Manifest, source: str, is_merged: bool) -> list[str]:
    """Return the lines of Python that load the model."""
    if not _is_adapter(manifest, is_merged):
        load = f"model = AutoModelForCausalLM.from_pretrained({json.dumps(source)})"
        return ["from transformers import AutoModelForCausalLM, AutoTokenizer", "", load]
    base = json.dumps(manifest.base_model or "FOLDER_OF_THE_BASE")
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"base = AutoModelForCausalLM.from_pretrained({base})",
        f"model = PeftModel.from_pretrained(base, {json.dumps(source)})",
    ]


def _rows(manifest: Manifest, facts: TrainedFacts) -> list[tuple[str, str]]:
    model, last = manifest.model, manifest.run.rounds
    rounds = ", ".join(map(str, facts.rounds)) + (f" of {last}" if last else "")
    rows = [
        ("Parameters", f"{parameter_count(model):,}" + (" of the adapter" if manifest.base is not None else "")),
        ("Context", f"{model.max_seq_len:,} tokens"),
        ("Run", f"`{manifest.run_id}`"),
        ("Coordinator", f"`{manifest.authority}`"),
        ("Method", str(manifest.outer.__struct_config__.tag)),
        ("Rounds", rounds),
        ("State", ", ".join(f"`{state}`" for state in facts.states)),
    ]
    if manifest.base_model:
        rows.append(("Trained from", f"`{manifest.base_model}`"))
    if facts.tokens:
        rows.append(("Tokens trained", f"{facts.tokens:,}"))
    if facts.losses:
        peers = "1 peer" if len(facts.losses) == 1 else f"the median of {len(facts.losses)} peers"
        rows.append(("Held-out loss", f"{median(facts.losses):.4f} nats a byte, as {peers} told it"))
    if manifest.data.pages is None:
        return [*rows, ("Text", _text(manifest, facts.corpora))]
    return [*rows, *_data_set(manifest.data, manifest.data.pages, facts.data_set)]


def _data_set(data: DataConfig, pages: PagesConfig, index: PageIndex | None) -> list[tuple[str, str]]:
    tokens, held_out = (windows * (data.seq_len + 1) for windows in (pages.windows, pages.held_out_windows))
    rows = [("Data set", f"`{pages.root}`"), ("Its tokens", f"{tokens:,} to train on, {held_out:,} held out")]
    if index is None:
        return rows
    documents = f"{index.train.documents:,} to train on, {index.held_out.documents:,} held out"
    said = [("Its source", index.source), ("Its license", index.license)]
    return [*rows, ("Its documents", documents), *((name, _escaped(text)) for name, text in said if text)]


def _text(manifest: Manifest, corpora: Sequence[CorpusFacts]) -> str:
    own = "the Python standard library of each machine" if manifest.data.source == "stdlib" else "a folder of each peer"
    read = [
        f"{corpus.train_bytes:,} bytes ({corpus.train_tokens:,} tokens) in {corpus.files:,} files, read by one of them"
        for corpus in corpora
    ]
    return "; ".join([own, *read])


def _escaped(text: str) -> str:
    """Return a name as Markdown that shows just its letters."""
    return _MARKS.sub(r"\\\1", plain(text))
