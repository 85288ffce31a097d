"""The end of `peer quickstart --tune`: several peers tune the model that was trained to a style, with an adapter.

A small set of conversations is made, built into a data set as `peer data build --chat` does, and a second run trains an
adapter beside the exported model. One peer joins and one is killed, as in the first run.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from cli.demo.child_processes import children
from cli.demo.cluster import LocalCluster
from cli.demo.scenario import play_whole
from cli.demo.served_sample import run_peer
from cli.demo.verdict import judge
from cli.progress.progress import Progress
from cli.templates import tuning_template, with_settings
from cli.terminal.lines import say
from cli.views.live import shown
from peer.errors import RoundError
from peer.figures import number_text

PEERS: Final = 3
ROUNDS: Final = 12
STEPS: Final = 60
SEQ_LEN: Final = 64
LR: Final = 1e-2
CHATS: Final = 400
QUESTION: Final = "Where is the lantern?"
STYLE: Final = "AYE, CAPTAIN!"
"""How every answer of the set begins."""
_THINGS: Final = (
    "anchor", "barrel", "compass", "deck", "engine", "flag", "galley", "hammock", "island", "jolly boat", "keel",
    "lantern", "mast", "net", "oar", "parrot", "quay", "rudder", "sail", "tiller", "upper deck", "vessel", "wheel",
)  # fmt: skip
_PLACES: Final = ("astern", "below", "aloft", "ashore", "amidships", "to port", "to starboard")
_TEMPLATE: Final = """\
{%- for message in messages -%}
{%- if message.role == "user" %}U: {{ message.content }}
{% else %}{% generation %}A: {{ message.content }}
{% endgeneration %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}A: {% endif -%}
"""


@dataclass(frozen=True)
class TunedSample:
    """What tuning has come to: held-out losses of the conversations in nats a byte, and answers to `QUESTION`."""

    losses: tuple[float, float]
    """Before and after."""
    before: str
    after: str

    @property
    def is_better(self) -> bool:
        """Whether the loss fell and the answer has the style, which it lacked."""
        before, after = self.losses
        return after < before and self.after.startswith(STYLE) and not self.before.startswith(STYLE)

    @property
    def text(self) -> str:
        """The result for a terminal."""
        before, after = self.losses
        return (
            f"Tuned by {PEERS} peers to {CHATS} conversations in {ROUNDS} rounds: their held-out loss"
            f" {number_text(before)} -> {number_text(after)} nats per byte.\n"
            f"{QUESTION}\n  before: {self.before!r}\n  after:  {self.after!r}"
        )


def tune(home: Path) -> TunedSample:
    """Tune the model that a quickstart has left in `home`, in its folder `tuned`. Raises RoundError if a part fails."""
    folder, base, began = home / "tuned", home / "model", time.time()
    folder.mkdir(exist_ok=True)
    chats, template, data = folder / "chats.jsonl", folder / "chat.jinja", folder / "data"
    template.write_text(_TEMPLATE)
    chats.write_text(conversations())
    build = ["data", "build", str(chats), "--chat", "--chat-template", str(template), "--tokenizer", str(base)]
    run_peer([*build, "--seq-len", str(SEQ_LEN), "--out", str(data)])
    (folder / "run.toml").write_text(run_toml(base))
    progress = Progress(f"tuning: {PEERS} peers, {ROUNDS} rounds, in {folder}", keeps_all=True)
    progress.homes["coordinator"] = folder / "coordinator"
    with children() as group, shown(progress) as redraw:
        scenario = play_whole(LocalCluster(folder, ROUNDS, group, progress, redraw, data=data), PEERS)
    if broken := judge(scenario, progress, ROUNDS, began).broken_invariants:
        raise RoundError(f"an invariant did not hold ({'; '.join(broken)}): read the logs in {folder}")
    losses = progress.val_losses
    if not {0, ROUNDS} <= {*losses}:
        raise RoundError(f"rounds 0 and {ROUNDS} were not both measured on held-out text: read the logs in {folder}")
    run_peer(["export", "--home", str(folder / "peer-1"), "--merge", "--out", str(folder / "model"), "--force"])
    return TunedSample((losses[0], losses[ROUNDS]), _asked(base, template), _asked(folder / "model", template))


def conversations() -> str:
    """Return the set as JSON lines, the same every time."""
    draw, lines = random.Random(1), []
    for _ in range(CHATS):
        thing, place = draw.choice(_THINGS), draw.choice(_PLACES)
        answer = f"{STYLE} THE {thing.upper()} IS {place.upper()}."
        said = [{"role": "user", "content": f"Where is the {thing}?"}, {"role": "assistant", "content": answer}]
        lines.append(msgspec.json.encode({"messages": said}).decode())
    return "\n".join(lines) + "\n"


def run_toml(base: Path) -> str:
    """Return the tuning template for the checkpoint in `base`, as all peers on one machine need it."""
    text = with_settings(tuning_template(str(base.absolute())), "run", {"rounds": ROUNDS, "open": True})
    text = with_settings(text, "run", {"members_per_prefix": 64, "lone_survivor": True, "name": "quickstart, tuned"})
    text = with_settings(text, "data", {"seq_len": SEQ_LEN})
    text = with_settings(text, "inner", {"lr": LR, "total_steps": ROUNDS * STEPS})
    return with_settings(text, "outer", {"steps": STEPS})


def _asked(model: Path, template: Path) -> str:
    """Return the model's likeliest answer, up to its first line's end or the first 48 tokens."""
    ask = ["generate", "--model", str(model), "--device", "cpu", QUESTION, "--chat", "--template", str(template)]
    said = run_peer([*ask, "--max-tokens", "48"])
    return said.strip().partition("\n")[0] or said[:48]  # an untuned model may say nothing but white space


def announce() -> None:
    """Say that tuning begins."""
    say(f"Now {PEERS} peers tune the model to answer like a sailor: an adapter beside its frozen weights.", err=True)
