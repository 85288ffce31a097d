"""Messages that the user edits on a terminal, with the earlier ones at hand: a prompt of prompt_toolkit.

It runs in a thread, as it has an event loop of its own, so that all other tasks continue while the user types. It
writes nothing to disk.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress

import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input.posix_utils import PosixStdinReader
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.output.vt100 import Vt100_Output

from cli.terminal.messages import CONTINUED, PROMPT, TOO_LONG, Message, is_open, message_of
from cli.terminal.typed_lines import LINE_BYTES_MAX, decoded
from peer.errors import ConfigError

_PIECE_BYTES = 1 << 14
_CONTROLS_END = "\xa0"  # what is below it prompt_toolkit shows itself, as ^X


class TypedPrompt:
    """The messages of a person at a terminal."""

    is_terminal = True

    def __init__(self, earlier: Sequence[str]) -> None:
        """`earlier`: messages for the Up key, the last one last."""
        typed = Vt100Input(sys.stdin)
        typed.stdin_reader = _Reader(sys.stdin.fileno(), encoding=sys.stdin.encoding)
        # A terminal's answer to a query of its cursor would come in as if it were typed, once the prompt has ended.
        shown = Vt100_Output.from_pty(sys.stdout)
        shown.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            input=typed,
            output=shown,
            history=InMemoryHistory(list(earlier)),
            key_bindings=_keys(),
            prompt_continuation=lambda width, number, wraps: "" if wraps else CONTINUED,
            input_processors=[_Plain()],
            enable_suspend=True,
        )
        self._leaves = False

    async def next(self) -> Message | None:
        """See `Messages`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_cancelled)
            text = await trio.to_thread.run_sync(self._asked)
            nursery.cancel_scope.cancel()
        if isinstance(text, KeyboardInterrupt):
            raise text
        return None if text is None else _message(text)

    def _asked(self) -> str | KeyboardInterrupt | None:
        """Return what was typed, in a thread that may wait; None where it ends."""
        try:
            return self._session.prompt(pre_run=self._leave_if_told, set_exception_handler=False, handle_sigint=False)
        except (EOFError, OSError):  # Ctrl-D, or the terminal has gone away
            return None
        except KeyboardInterrupt as interrupt:
            return interrupt

    async def _end_when_cancelled(self) -> None:
        """End the thread's prompt with this task."""
        self._leaves = False
        try:
            await trio.sleep_forever()
        finally:
            self._leaves = True
            loop = self._session.app.loop
            if loop is not None:
                with suppress(RuntimeError):  # the loop has just been closed
                    loop.call_soon_threadsafe(self._leave_if_told)

    def _leave_if_told(self) -> None:
        """End the prompt, in its own thread, if it is to end and has not. It checks once its loop runs, so that it
        either sees what `_end_when_cancelled` has set, or is called by that."""
        app = self._session.app
        if self._leaves and app.future is not None and not app.future.done():
            app.exit(exception=EOFError)


class _Reader(PosixStdinReader):
    """The bytes of a terminal. One that has gone away is at its end; the original would read it for ever."""

    def read(self, count: int = _PIECE_BYTES) -> str:
        try:
            if self.closed or not select.select([self.stdin_fd], [], [], 0)[0]:
                return ""
            data = os.read(self.stdin_fd, count)
        except OSError:
            data = b""
        self.closed = not data
        return self._stdin_decoder.decode(data)


class _Plain(Processor):
    """Shows what a terminal would obey, or not show, as `peer.plain_text` does, letter by letter."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        fragments = transformation_input.fragments
        return Transformation([(fragment[0], "".join(map(_shown, fragment[1]))) for fragment in fragments])


def _shown(letter: str) -> str:
    return letter if letter.isprintable() or letter < _CONTROLS_END else "?"


def _keys() -> KeyBindings:
    """Return what Enter, Ctrl-C and a paste do."""
    keys, at_text = KeyBindings(), has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=at_text)
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("c-c", filter=at_text)
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    @keys.add(Keys.BracketedPaste, filter=at_text)
    def _paste(event: KeyPressEvent) -> None:
        lines = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(lines.rstrip("\n"))  # the end of the last line is no line of its own

    return keys


def _message(text: str) -> Message:
    """Raises ConfigError for bytes that are no text, and for more than a message may have."""
    data = text.encode(errors="surrogateescape")
    if len(data) > LINE_BYTES_MAX:
        raise ConfigError(TOO_LONG)
    has_bytes = any("\ud800" <= letter <= "\udfff" for letter in text)  # that are none of its encoding
    return message_of(decoded(data, "the message") if has_bytes else text)
