"""Examples of each command, which its `--help` ends with."""

from __future__ import annotations

from typing import Final

Example = tuple[str, str]
"""The effect of a command, and the command."""

EXAMPLES: Final[dict[str, tuple[Example, ...]]] = {
    "quickstart": (
        ("train a small model with three peers", "peer quickstart"),
        ("with five, a monitor page, and 12 rounds", "peer quickstart --peers 5 --monitor --rounds 12"),
    ),
    "coordinate": (
        ("write a commented RUN.toml", "peer coordinate --init RUN.toml"),
        ("create its run and print the invite", "peer coordinate RUN.toml"),
    ),
    "join": (
        ("train on your own text, and answer questions too", "peer join INVITE --data ~/texts --serve"),
        ("continue a run of `peer ls`", "peer join NAME"),
    ),
    "serve": (
        ("serve a checkpoint of this machine", "peer serve --model ~/models/llama"),
        ("serve further blocks of it on another machine", "peer serve INVITE --memory 8"),
    ),
    "generate": (
        ("continue a text", 'peer generate INVITE "Once upon a time"'),
        ("ask a model of this machine", 'peer generate --model ~/models/llama --chat "Why is the sky blue?"'),
    ),
    "chat": (
        ("talk with a served model", 'peer chat INVITE --system "Be brief."'),
        ("keep the conversation in a file", "peer chat INVITE --history talk.jsonl"),
    ),
    "api": (
        ("for programs of this machine", "peer api INVITE"),
        ("for other machines", "peer api INVITE --listen 0.0.0.0:8080 --key-file keys"),
    ),
    "ls": (
        ("the runs and served models of this machine", "peer ls"),
        ("the same for a program", "peer ls --json"),
    ),
    "pause": (
        ("give the machine back to its owner", "peer pause"),
        ("for two hours", "peer pause --for 2h"),
    ),
    "resume": (
        ("train again", "peer resume"),
        ("one of several peers", "peer resume --home ~/.barnraise/RUN_ID"),
    ),
    "invite": (
        ("an invite for up to five peers, valid for a week", "peer invite --guests 5 --days 7"),
        ("from the home of a member", "peer invite --home ~/.barnraise/RUN_ID"),
    ),
    "regroup": (
        ("continue with the members that answer", "peer regroup"),
        ("without one of them", "peer regroup --without PEER_ID"),
    ),
    "status": (
        ("peers, round and loss, again and again", "peer status INVITE --watch"),
        ("a picture of the loss", "peer status --home ~/.barnraise/RUN_ID --plot loss.png"),
    ),
    "monitor": (
        ("a page on this machine", "peer monitor INVITE"),
        (
            "a page that needs no server, and a webhook",
            "peer monitor INVITE --publish www --notify https://example.org/x",
        ),
    ),
    "top": (
        ("watch a run", "peer top INVITE"),
        ("watch the run of a home", "peer top --home ~/.barnraise/RUN_ID"),
    ),
    "export": (
        ("the last commit, from the run's members", "peer export INVITE --out model"),
        ("from a home, without the network", "peer export --home ~/.barnraise/RUN_ID --out model --dtype bf16"),
    ),
    "plan": (
        ("what a run takes of this machine", "peer plan RUN.toml"),
        ("of another one", "peer plan RUN.toml --device rtx3060 --link 20mbit"),
    ),
    "doctor": (
        ("check this machine", "peer doctor"),
        ("check the way to a run, and your text for it", "peer doctor INVITE --data ~/texts"),
    ),
    "data": (
        ("a data set of all text in a folder", "peer data build ~/texts --tokenizer bytes --seq-len 1024 --out pages"),
        ("what RUN.toml needs for it", "peer data show pages"),
    ),
    "relay": (
        ("on a machine with a public address", "peer relay --announce /ip4/203.0.113.7/tcp/4001"),
        ("for at most 50 peers and 100 Mbit/s", "peer relay --reservations 50 --rate 100"),
    ),
}


def epilog(command: str) -> str:
    """Return the examples of a command as click shows them: line by line."""
    lines = [f"  {words}\n      {what}" for what, words in EXAMPLES[command]]
    return "\b\nExamples:\n" + "\n".join(lines)
