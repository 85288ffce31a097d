"""The folder in which wrong inputs are typed: files and homes that are damaged, of another kind, or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cli.templates import template, with_settings
from peer.identity import Identity
from swarm.run.invite import Invite

LONG: Final = "9" * 5000
RUN_ID: Final = "abcdefgh234567abcdefgh234567abcd"


def invite() -> str:
    """Return an invite to a run of which no peer answers."""
    authority = Identity(bytes(32)).peer_id  # the same in each process
    return str(Invite(RUN_ID, authority, (f"/ip4/127.0.0.1/tcp/1/p2p/{authority}",)))


def lay_out(place: Path) -> None:
    """Fill an empty folder."""
    for name in ("empty", "others", "others/checkpoints", "log-is-folder", "log-is-folder/events.jsonl"):
        (place / name).mkdir()
    (place / "others" / "notes.txt").write_text("mine")
    (place / "others" / "tokenizer.json").write_text("{}")
    (place / "file").write_text("x")
    (place / "binary").write_bytes(bytes(range(256)))
    (place / "latin").write_bytes("J\u00fcrgen".encode("latin-1"))
    (place / "talk").write_text('{"role":"user","content":"a"}\n\n{"role":7}\n')
    (place / "loop").symlink_to("loop")
    (place / "gone").symlink_to("nowhere")
    for name, file, content in (
        ("bad-key", "identity.key", "junk"),
        ("bad-choices", "choices.json", "{"),
        ("bad-invite", "invite", "junk"),
        ("bad-run", "manifest.msgpack", "junk"),
        ("bad-model", "config.json", "[]"),
        ("no-layers", "config.json", "{}"),
    ):
        (place / name).mkdir()
        (place / name / file).write_text(content)
        (place / name / file).chmod(0o600)
    (place / "bad-run" / "tokenizer.json").write_text("{}")
    text = template()
    (place / "run.toml").write_text(text)
    for name, section, values in (
        ("zero", "run", {"rounds": -1}),
        ("huge", "run", {"rounds": 1 << 60}),
        ("word", "inner", {"lr": "fast"}),
        ("type", "run", {"open": "yes"}),
        ("method", "outer", {"method": "sorcery"}),
        ("unknown", "inner", {"lrr": 1.0}),
        ("context", "data", {"seq_len": 1 << 40}),
        ("layers", "model", {"layers": 0}),
    ):
        (place / f"{name}.toml").write_text(with_settings(text, section, values))
    (place / "nan.toml").write_text(text.replace("lr = ", "lr = nan #", 1))
    (place / "infinite.toml").write_text(text.replace("lr = ", "lr = inf #", 1))
    (place / "digits.toml").write_text(text.replace("rounds = ", f"rounds = {LONG} #", 1))
    (place / "deep.toml").write_text("a = " + "[" * 5000)
    (place / "twice.toml").write_text(text + "\n[run]\n")
    (place / "latin.toml").write_bytes("name = '\u00fc'".encode("latin-1"))
    (place / "nothing.toml").write_text("")
