"""`peer api`: serve OpenAI's interface to a served model.

Beside it there is a chat page. Both are on this machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cli.combinations import refuse_others
from cli.local_model import NamedModel, invite_to, local_model_options
from cli.options import (
    count_option,
    invite_argument,
    template_option,
    tied_option,
    wire_option,
)
from cli.packages import check_web_packages
from cli.run import run_until_stopped
from cli.terminal.lines import say, say_json
from peer.errors import ConfigError

if TYPE_CHECKING:
    from peer.config import HiddenType, Quantization
    from peer.events import Event
    from peer.ipc.block_messages import WireType
    from swarm.gateway.limits import ApiKeys, Quotas
    from swarm.web.listening import ListenAddress

KEY_VARIABLE: Final = "PEER_API_KEY"


@click.command()
@invite_argument(required=False)
@local_model_options
@click.option(
    "--listen", metavar="HOST:PORT", default="127.0.0.1:8080", show_default=True, help="An IP address; port 0: any."
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    envvar=KEY_VARIABLE,
    help="A key that requests must bring; several times: several. Other users of this machine can read it here: better"
    f" set {KEY_VARIABLE} to such keys, with spaces between, or give --key-file.",
)
@click.option(
    "--key-file", type=click.Path(path_type=Path, dir_okay=False), help="Hashes of such keys, one a line, with names."
)
@click.option("--new-key", metavar="NAME", help="Print a new key, add its hash to --key-file, and stop.")
@click.option(
    "--rate", type=click.IntRange(1, 1_000_000), help="Requests a minute for each key.  [default: any number]"
)
@count_option("--at-once", 1, 512, 16, "Requests at once, each key.")
@click.option(
    "--allow-origin",
    "allow_origins",
    metavar="ORIGIN",
    multiple=True,
    help="Let web pages of this origin use the model from a browser, like https://app.example; several times: several;"
    " * for all.  [default: none]",
)
@template_option("How messages become text", "the model's, else plain")
@click.option(
    "--tool-parser",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="The form in which the model calls tools: hermes, qwen3_coder, mistral, llama3_json or pythonic; auto: as the"
    " chat template shows.",
)
@wire_option
@click.option("--json", "as_json", is_flag=True, help="Print what happens as JSON lines.")
@tied_option
def api(
    invite: str | None,
    model: str | None,
    dtype: HiddenType | None,
    quantize: Quantization | None,
    device: str,
    threads: int | None,
    listen: str,
    keys: tuple[str, ...],
    key_file: Path | None,
    new_key: str | None,
    rate: int | None,
    at_once: int,
    allow_origins: tuple[str, ...],
    template: str | None,
    tool_parser: str,
    wire: WireType | None,
    as_json: bool,
    tied: bool,
) -> None:
    """Serve OpenAI's interface to the model of INVITE (or of --model, on this machine), and a chat page, until Ctrl-C.

    Any client of OpenAI's works, with the base URL that is printed. Without a key only this machine can use it.
    """
    if new_key is not None:
        refuse_others("--new-key", "new_key", "key_file")
        _add_key(key_file, new_key)
        return
    check_web_packages("peer api", metrics=False)
    from swarm.gateway.limits import Quotas
    from swarm.gateway.reading.call_formats import check_parser
    from swarm.web.listening import ListenAddress
    from swarm.web.origins import read_origin

    check_parser(tool_parser)
    origins = tuple(map(read_origin, allow_origins))
    address, known = ListenAddress.parse(listen), _read_keys(keys, key_file)
    if not address.is_loopback and not known.needed:
        raise ConfigError(
            f"--listen {listen} lets other machines use this model in your name: give --key or --key-file, or listen at"
            " 127.0.0.1"
        )
    with invite_to(invite, model, dtype, quantize, device, threads) as opened:
        limits = _Limits(known, Quotas(rate, at_once), origins)
        run_until_stopped(_Api(opened, wire, template, tool_parser, address, limits, as_json).run, tied)


def _read_keys(keys: tuple[str, ...], key_file: Path | None) -> ApiKeys:
    from swarm.gateway.limits import ApiKeys, key_hash, read_keys

    if keys and key_file is not None:
        raise ConfigError(f"--key (or {KEY_VARIABLE}) and --key-file were both given: choose one")
    if not all(key.strip() for key in keys):
        raise ConfigError("--key is empty: give a key, or make one with --new-key")
    if key_file is not None:
        return read_keys(key_file)
    return ApiKeys({key_hash(key.strip()): f"key {number}" for number, key in enumerate(keys, 1)})


def _add_key(key_file: Path | None, name: str) -> None:
    from swarm.gateway.limits import key_hash, new_key, read_keys

    if key_file is None:
        raise ConfigError("--new-key has no file to write to: give --key-file")
    joint = ""
    if os.path.exists(key_file) and os.path.getsize(key_file):
        read_keys(key_file)  # it is one of ours
        joint = "" if key_file.read_bytes().endswith(b"\n") else "\n"
    key = new_key()
    label = "".join(letter if letter.isprintable() else "?" for letter in name)
    try:
        with open(key_file, "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(f"{joint}{key_hash(key)} {label}\n")
    except OSError as error:
        raise ConfigError(f"{key_file} cannot be written ({error.strerror}): choose another --key-file") from error
    say(key)


@dataclass(frozen=True)
class _Limits:
    """Who may use the gateway, and how much."""

    keys: ApiKeys
    quotas: Quotas
    origins: tuple[str, ...]


@dataclass
class _Api:
    """The gateway of one command."""

    named: NamedModel
    wire: WireType | None
    template: str | None
    tool_parser: str
    address: ListenAddress
    limits: _Limits
    as_json: bool
    _sentence: str = field(default="", init=False)

    async def run(self) -> None:
        from swarm.gateway.app import Gateway, gateway_app
        from swarm.gateway.template import open_template
        from swarm.inference.client import open_model
        from swarm.web.listening import serve_http

        opened = open_model(self.named.invite, wire=self.wire, patience=self.named.patience())
        async with opened as model, open_template(model.manifest.text, self.template, self.tool_parser) as template:
            self._sentence = template.sentence
            limits = self.limits
            gateway = Gateway(model, template, limits.keys, limits.quotas, self.address.name, limits.origins)
            name = model.manifest.name
            with model.client.host.events.subscribed(self._show):
                await serve_http(gateway_app(gateway), self.address, lambda url: self._listening(name, url))

    def _listening(self, name: str, url: str) -> None:
        from swarm.web.origins import EVERY

        if self.as_json:
            listening = {"event": "listening", "url": url, "model": name, "chat_template": self._sentence}
            say_json(listening, uncut=True)
            return
        say(f"{name} is served as OpenAI's interface at {url}/v1", f"Chat page: {url}/", self._sentence, err=True)
        if not self.address.is_loopback:
            say("Keys and texts cross this network unencrypted: put a proxy with TLS before it.", err=True)
        if EVERY in self.limits.origins and not self.limits.keys.needed:
            say("Every web page that is open on this machine can use the model: give --key, or name origins.", err=True)

    def _show(self, event: Event) -> None:
        if self.as_json and event.name == "request_answered":
            say_json({"event": event.name, "at": event.at, **event.fields})
