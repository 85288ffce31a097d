"""`peer chat`: talk with a served model.

It happens in the terminal.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import trio

from cli.combinations import refuse_without
from cli.local_model import NamedModel, invite_to, local_model_options
from cli.options import (
    Number,
    adapter_option,
    count_option,
    invite_argument,
    template_option,
    wait_option,
    wire_option,
)
from cli.run import Stopped, run_until_stopped
from cli.terminal.lines import say
from cli.terminal.messages import MARK, LineMessages, Messages, can_edit
from cli.terminal.stream import AnswerText, write_text
from cli.terminal.usage import nearest
from peer.errors import BarnraiseError, ConfigError
from peer.figures import several
from peer.plain_text import plain

if TYPE_CHECKING:
    from peer.config import HiddenType, Quantization
    from peer.ipc.block_messages import WireType
    from peer.ipc.sampling_options import Sampling
    from swarm.gateway.chat_log import ChatLog
    from swarm.gateway.conversation import Conversation
    from swarm.inference.client import ModelClient

_COMMANDS: Final = ("/system", "/reset", "/stats", "/exit", "/help")
_WORD_MAX: Final = 40
_HELP: Final = (
    "/system TEXT  say how the model should answer; without TEXT: drop it",
    "/reset        begin a new conversation",
    "/stats        turns, tokens, speed and servers so far",
    "/exit         end, as Ctrl-D does",
    f"{MARK}           begins a message of several lines, and ends it; what is pasted is one message",
    "Up, Ctrl-R    earlier messages of this conversation",
    "Ctrl-C clears a line, stops an answer, and ends where there is neither.",
    "A message that begins with a slash needs a space before it.",
)


@click.command()
@invite_argument(required=False)
@local_model_options
@template_option("How messages become text", "the model's, else plain")
@click.option("--system", default="", metavar="TEXT", help="How the model should answer.")
@count_option("--max-tokens", 1, 1 << 20, 512, "Of one answer.")
@click.option("--temperature", type=Number(0, 100), default=0.7, show_default=True, help="0: the likeliest.")
@click.option("--top-p", type=Number(0, 1), default=1.0, help="Only the likeliest that have this probability.")
@click.option("--seed", type=click.IntRange(0, (1 << 64) - 1), help="The same seed draws the same tokens.")
@adapter_option
@wire_option
@wait_option
@click.option(
    "--history",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep the conversation there, and continue the one that is. Else nothing is written to disk.",
)
def chat(
    invite: str | None,
    model: str | None,
    dtype: HiddenType | None,
    quantize: Quantization | None,
    device: str,
    threads: int | None,
    template: str | None,
    system: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    adapter: str | None,
    wire: WireType | None,
    wait: float,
    history: Path | None,
) -> None:
    """Talk with the model of INVITE, computed by its servers, which can read what is said; with --model, in place of
    INVITE, by this machine alone.

    /system TEXT says how the model should answer, /reset begins a new conversation, /stats describes this one,
    /exit ends, /help lists all. Ctrl-C clears a line, stops an answer, and ends where there is neither.
    """
    from peer.ipc.sampling_options import Sampling, new_seed
    from swarm.gateway.chat_log import ChatLog

    refuse_without("a --temperature above 0", temperature > 0, "top_p")
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=new_seed() if seed is None else seed)
    with invite_to(invite, model, dtype, quantize, device, threads) as opened:
        log = None if history is None else ChatLog(history)
        run_until_stopped(
            _Chat(opened.with_adapter(adapter), wire, wait, log, template, system, sampling, max_tokens).run
        )


@dataclass
class _Chat:
    """One conversation in the terminal."""

    named: NamedModel
    wire: WireType | None
    wait_s: float
    log: ChatLog | None
    template: str | None
    system: str
    sampling: Sampling
    max_tokens: int
    _messages: Messages = field(default_factory=LineMessages)
    _answering: trio.CancelScope | None = None
    _interrupted: bool = False

    async def run(self) -> None:
        from swarm.gateway.conversation import Conversation
        from swarm.gateway.template import open_template
        from swarm.inference.client import open_model

        patience = self.named.patience(self.wait_s, self._waits)
        opened = open_model(self.named.invite, wire=self.wire, patience=patience, name=self.named.adapter)
        async with opened as model, open_template(model.manifest.text, self.template) as template:
            with closing(Conversation(model, template, self.sampling, self.max_tokens)) as conversation:
                await self._converse(model, conversation, template.sentence)
        if self._interrupted:
            raise Stopped(signal.SIGINT)

    async def _converse(self, model: ModelClient, conversation: Conversation, about_template: str) -> None:
        conversation.system = self.system
        if self.log is not None:
            conversation.messages = self.log.messages()
        if can_edit():
            from cli.terminal.typed_prompt import TypedPrompt  # here: it is slow to load, and a pipe needs it not

            self._messages = TypedPrompt([said.content for said in conversation.messages if said.role == "user"])
        context = model.manifest.model.max_seq_len
        say(f"{model.name}, {context} tokens of context. /help lists all.", about_template, err=True)
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._interrupt, signals, nursery.cancel_scope)
                await self._talk(model, conversation)
                nursery.cancel_scope.cancel()

    def _waits(self, missing: str) -> None:
        say("", f"{missing} (waiting for {self.wait_s:g} s; Ctrl-C stops).", err=True)

    async def _interrupt(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        """Stop the answer at Ctrl-C; without one end."""
        async for _ in signals:
            if self._answering is not None:
                self._answering.cancel()
            else:
                self._interrupted = True
                scope.cancel()

    async def _talk(self, model: ModelClient, conversation: Conversation) -> None:
        while True:
            try:
                message = await self._messages.next()
            except ConfigError as error:
                self._tell(error)
                continue
            except KeyboardInterrupt:
                self._interrupted = True
                return
            if message is None:
                return
            if message.is_command:
                name, *text = message.text.split(maxsplit=1)
                if name == "/exit":
                    return
                self._command(model, conversation, name, "".join(text))
            elif message.text.strip():
                await self._answer(model, conversation, message.text)

    async def _answer(self, model: ModelClient, conversation: Conversation, text: str) -> None:
        shown = AnswerText()
        try:
            with trio.CancelScope() as self._answering:
                async with aclosing(conversation.answer(text)) as pieces:
                    async for part in pieces:
                        shown.add(part.thought, part.text)
        except BarnraiseError as error:
            self._tell(error)
            return
        finally:
            stopped, self._answering = self._answering, None
        write_text("\n")
        say(_facts(model, conversation), err=True)
        self._keep(conversation)
        if stopped is not None and stopped.cancelled_caught:
            say("Stopped.", err=True)

    def _tell(self, error: BarnraiseError) -> None:
        """Print the error on a terminal; without one, raise it."""
        if not self._messages.is_terminal:
            raise error
        say("", f"peer: {error}", err=True)

    def _keep(self, conversation: Conversation) -> None:
        """Write the conversation down, if it is to be kept."""
        if self.log is not None:
            self.log.write(conversation.messages)

    def _command(self, model: ModelClient, conversation: Conversation, name: str, text: str) -> None:
        if name == "/system":
            conversation.system = text
            say("The system prompt is set." if text else "There is no system prompt now.", err=True)
        elif name == "/reset":
            conversation.reset()
            self._keep(conversation)
            say("A new conversation begins.", err=True)
        elif name == "/stats":
            say(*_stats(model, conversation), err=True)
        elif name == "/help":
            say(*_HELP, err=True)
        else:
            near = nearest(name, _COMMANDS)
            meant = f"write {near}; " if near else ""
            say(f"{plain(name, _WORD_MAX)} is no command: {meant}/help lists them", err=True)


def _stats(model: ModelClient, conversation: Conversation) -> list[str]:
    """Return the figures of the conversation."""
    total, context = conversation.total, model.manifest.model.max_seq_len
    rate = f", {total.timed / total.seconds:.1f} a second" if total.seconds > 0 else ""
    return [
        f"{several(total.answers, 'answer')}, {several(total.tokens, 'token')}{rate}",
        f"{conversation.held} of {context} tokens of context are used",
        f"{several(conversation.sessions, 'session')} begun, {several(total.failovers, 'server')} replaced",
        _facts(model, conversation),
    ]


def _facts(model: ModelClient, conversation: Conversation) -> str:
    """Return the facts about the last answer."""
    answer = conversation.last
    if answer is None or not answer.tokens:
        return "No answer."
    rate = f", {answer.tokens_a_second:.1f} a second" if answer.tokens > 1 else ""
    records = model.servers.records
    hops = ", ".join(
        f"{records[hop.peer].name if hop.peer in records else hop.peer} (blocks {hop.first} to {hop.end - 1})"
        for hop in answer.route
    )
    replaced = f"; {answer.failovers} replaced" if answer.failovers else ""
    return f"[{answer.tokens} tokens{rate}, by {hops}{replaced}]"
