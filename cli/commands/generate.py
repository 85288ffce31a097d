"""`peer generate`: continue a text with a served model.

The model may also be one on this machine.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from cli.combinations import refuse_without
from cli.local_model import NamedModel, invite_to, local_model_options
from cli.options import Number, adapter_option, template_option, wait_option, wire_option
from cli.run import run_until_stopped
from cli.terminal.lines import is_terminal, say, say_json
from cli.terminal.stream import write_text
from cli.terminal.typed_lines import whole_input
from peer.errors import ConfigError
from peer.figures import size_text

if TYPE_CHECKING:
    from peer.config import HiddenType, Quantization
    from peer.ipc.block_messages import WireType
    from peer.ipc.sampling_options import Sampling
    from swarm.inference.client import ModelClient
    from swarm.inference.route import Route


@click.command()
@click.argument("invite", required=False)
@click.argument("prompt", required=False)
@local_model_options
@adapter_option
@click.option("--chat", is_flag=True, help="Ask PROMPT as a message, by the model's chat template.")
@template_option("How messages become text", "the model's, else plain")
@click.option("--max-tokens", type=click.IntRange(1, 1 << 20), default=128, show_default=True)
@click.option("--temperature", type=Number(0, 100), default=0.0, show_default=True, help="0: the likeliest.")
@click.option("--top-k", type=click.IntRange(0, 1 << 24), default=0, help="Only the k likeliest tokens.")
@click.option("--top-p", type=Number(0, 1), default=1.0, help="Only the likeliest that have this probability.")
@click.option("--min-p", type=Number(0, 1), default=0.0, help="Only those with this share of the likeliest.")
@click.option("--repetition-penalty", type=Number(0.001, 1000), default=1.0)
@click.option("--stop", "stops", multiple=True, help="A text at which the answer ends. May be given several times.")
@click.option("--special", is_flag=True, help="Show special tokens, such as the one that ends a message, too.")
@click.option("--seed", type=click.IntRange(0, (1 << 64) - 1), help="The same seed draws the same tokens.")
@wire_option
@wait_option
@click.option("--n", "count", type=click.IntRange(1, 64), default=1, show_default=True, help="How many answers.")
@click.option("--logprobs", type=click.IntRange(0, 20), default=0, help="How many top tokens to print (with --json).")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each token and one for the whole.")
def generate(
    invite: str | None,
    prompt: str | None,
    model: str | None,
    dtype: HiddenType | None,
    quantize: Quantization | None,
    device: str,
    threads: int | None,
    adapter: str | None,
    chat: bool,
    template: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    stops: tuple[str, ...],
    special: bool,
    seed: int | None,
    wire: WireType | None,
    wait: float,
    count: int,
    logprobs: int,
    as_json: bool,
) -> None:
    """Continue PROMPT (or standard input) with the model of INVITE, computed by its servers; with --model, in place of
    INVITE, by this machine alone."""
    if template is not None and not chat:
        raise ConfigError("--template is about messages, and PROMPT is none: give --chat too")
    refuse_without("--json", as_json, "logprobs")
    refuse_without("a --temperature above 0", temperature > 0, "top_k", "top_p", "min_p")
    if model is not None:
        if prompt is not None:
            raise ConfigError("both INVITE and --model were given: choose one")
        invite, prompt = None, invite
    text = whole_input() if prompt is None or prompt == "-" else prompt
    from peer.ipc.sampling_options import Sampling

    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=secrets.randbits(53) if seed is None else seed,
        logprobs=logprobs,
    )
    with invite_to(invite, model, dtype, quantize, device, threads) as opened:
        answers = _Answers(
            opened.with_adapter(adapter),
            text,
            sampling,
            wire,
            wait,
            max_tokens,
            stops,
            count,
            as_json,
            chat,
            template,
            special,
        )
        run_until_stopped(answers.run)


@dataclass
class _Answers:
    """The answers of one command."""

    named: NamedModel
    text: str
    sampling: Sampling
    wire: WireType | None
    wait_s: float
    max_tokens: int
    stops: tuple[str, ...]
    count: int
    as_json: bool
    chat: bool
    template: str | None
    special: bool

    async def run(self) -> None:
        from swarm.inference.client import open_model

        began, patience = time.monotonic(), self.named.patience(self.wait_s, self._waits)
        async with open_model(self.named.invite, wire=self.wire, patience=patience, name=self.named.adapter) as model:
            prompt = await self._prompt(model)
            for index in range(self.count):
                await self._answer(model, prompt, index, began)
                began = time.monotonic()

    def _waits(self, missing: str) -> None:
        """Tell what the answer waits for."""
        if self.as_json:
            say_json({"event": "waiting", "reason": missing, "wait_s": self.wait_s}, uncut=True)
        else:
            say("", f"{missing} (waiting for {self.wait_s:g} s).", err=True)

    async def _prompt(self, model: ModelClient) -> list[int]:
        """Return the prompt's tokens; with --chat, of a conversation in which it is the user's first message."""
        if not self.chat:
            return await model.text.encode(self.text, special=True)
        from swarm.gateway.template import ChatMessage, open_template

        async with open_template(model.manifest.text, self.template) as template:
            self._tell_template(template.sentence)
            text = await template.render([ChatMessage("user", self.text)])
            self.stops = (*self.stops, *template.stops)
            return await model.text.encode(text, special=template.is_plain)

    def _tell_template(self, sentence: str) -> None:
        if self.as_json:
            say_json({"event": "chat_template", "chat_template": sentence}, uncut=True)
        elif is_terminal():
            say(sentence, err=True)

    async def _answer(self, model: ModelClient, prompt: list[int], index: int, began: float) -> None:
        import msgspec

        from swarm.inference.decoding import TextStream

        sampling = msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + index) % (1 << 64))
        session = model.session(sampling)
        stream = TextStream(model.text, self.stops, prompt, () if self.special else model.special)
        tokens, first_s, finish, route = list[int](), 0.0, "length", list[dict[str, Any]]()
        try:
            async for drawn in session.generate(prompt, self.max_tokens):
                first_s = first_s or time.monotonic() - began
                route = self._told_route(model, session.route, route)
                tokens.append(drawn.token)
                if drawn.token in model.manifest.text.stops:
                    finish = "stop"
                    break
                piece = await stream.push(drawn.token)
                self._show(piece, drawn.token, drawn.logprob, drawn.likeliest)
                if stream.stopped:
                    finish = "stop"
                    break
        finally:
            session.close()
        self._show(await stream.finish())
        seconds = time.monotonic() - began
        hidden_bytes, link_s = self._link(model, session.route, len(prompt))
        if self.as_json:
            done = session.commit  # of a training run
            commit = {} if done is None else {"round": done.round, "commit": done.name.hex()}
            say_json(
                {
                    "event": "answer",
                    "text": stream.text,
                    "tokens": tokens,
                    "finish": finish,
                    "route": route,
                    "seed": sampling.seed,
                    "prompt_tokens": len(prompt),
                    "failovers": session.failovers,
                    **commit,
                    "first_token_s": round(first_s, 4),
                    "hidden_bytes": hidden_bytes,
                    "link_s": round(link_s, 4),
                    "seconds": round(seconds, 4),
                },
                uncut=True,
            )
            return
        write_text("\n")
        if not is_terminal():
            return
        rate = (len(tokens) - 1) / (seconds - first_s) if len(tokens) > 1 and seconds > first_s else 0.0
        link = f" ({size_text(hidden_bytes)} of hidden states a hop" if hidden_bytes else ""
        link += f", {link_s:.2f} s over the slowest uplink" if link_s else ""
        of = "" if session.commit is None else f" of round {session.commit.round}"
        by = "1 server" if len(route) == 1 else f"{len(route)} servers"
        say(
            f"{len(tokens)} tokens{of} by {by}, {rate:.1f} a second, the first after"
            f" {first_s:.2f} s{link}{')' if link else ''}.",
            err=True,
        )

    def _link(self, model: ModelClient, route: Route, tokens: int) -> tuple[int, float]:
        """Return the bytes of a prompt from each server to the next, and the seconds that they take over the slowest
        measured uplink; 0 where there is none."""
        from peer.ipc.block_messages import row_bytes

        manifest = model.manifest
        size = tokens * row_bytes(manifest.model.hidden_size, self.wire or model.servers.dtype) if len(route) > 1 else 0
        rate = model.servers.uplink_bytes_s(route)
        return size, size / rate if rate else 0.0

    def _told_route(self, model: ModelClient, route: Route, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the route as JSON, and tell it if it is another one than before."""
        records = model.servers.records
        names = {hop.peer: records[hop.peer].name if hop.peer in records else "" for hop in route}
        now = [{"peer": h.peer, "name": names[h.peer], "first": h.first, "end": h.end} for h in route]
        if self.as_json and now != before:
            say_json({"event": "route", "route": now}, uncut=True)
        return now

    def _show(
        self, piece: str, token: int | None = None, logprob: float = 0.0, likeliest: tuple[tuple[int, float], ...] = ()
    ) -> None:
        if not self.as_json:
            write_text(piece)
        elif token is not None:
            told: dict[str, Any] = {"event": "token", "token": token, "text": piece}
            if self.sampling.logprobs:
                told |= {"logprob": logprob, "likeliest": likeliest}
            say_json(told, uncut=True)
