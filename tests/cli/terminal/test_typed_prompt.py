"""Messages as a person types them: keys, pastes, several lines, and what ends the prompt."""

from __future__ import annotations

import os
import signal
import sys
import termios
from pathlib import Path

import pytest
import trio

from cli.terminal.messages import LineMessages, Message, can_edit, is_open, message_of
from peer.errors import ConfigError
from tests.cli.support.lost_terminal import losable_terminal
from tests.cli.support.seen_in import Terminal, program

TALKS = """
import trio
from cli import main as program
from cli.run import run_until_stopped
from cli.terminal.lines import say
from cli.terminal.typed_prompt import TypedPrompt
from peer.errors import ConfigError

async def talk():
    prompt = TypedPrompt(["earlier"])
    say("up")
    while True:
        try:
            message = await prompt.next()
        except ConfigError as error:
            say(f"refused: {error}")
            continue
        except KeyboardInterrupt:
            return say("interrupted")
        if message is None:
            return say("over")
        say(f"command {message.text!r}" if message.is_command else f"message {message.text!r}")
        if message.text == "sleep":
            await trio.lowlevel.wait_readable(0)  # of a whole line, which is typed ahead
            say("awake")

program.group.main = lambda **options: run_until_stopped(talk)
program.main()
"""
UP, PASTE, PASTED = "\x1b[A", "\x1b[200~", "\x1b[201~"
FUNCTION = "def f(x):\r    return x\r"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" one ", Message("one")),
        ("/reset", Message("/reset", is_command=True)),
        (" /etc", Message("/etc")),
        ("/etc\n/usr", Message("/etc\n/usr")),
        ('"""/reset"""', Message("/reset")),
        ('"""\n  a\n\n b\n""" ', Message("  a\n\n b")),
        ('"""a\nb"""', Message("a\nb")),
        ('""""""', Message("")),
        ('"""Doc."""\nimport os\n', Message('"""Doc."""\nimport os')),
        ('"""Doc.\n"""\nimport os', Message('"""Doc.\n"""\nimport os')),
        ('a """b"""', Message('a """b"""')),
    ],
)
def test_a_text_is_one_message(text: str, message: Message) -> None:
    assert not is_open(text) and message_of(text) == message


@pytest.mark.parametrize("text", ['"""', '""""', '"""a', '"""a\n"""b', '"""a"""b'])
def test_a_mark_goes_on_until_a_line_ends_in_one(text: str) -> None:
    assert is_open(text) and not is_open(text + '\n"""')


@pytest.mark.parametrize(
    ("term", "terminals", "edits"),
    [("xterm", "both", True), ("dumb", "both", False), ("", "both", False), ("xterm", "stdin", False)],
)
def test_only_a_terminal_that_can_do_more_than_lines_is_edited_on(
    monkeypatch: pytest.MonkeyPatch, term: str, terminals: str, edits: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    ours, theirs = os.openpty()
    with os.fdopen(ours), open(theirs) as terminal, open(os.devnull) as file:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(sys, "stdout", terminal if terminals == "both" else file)
        assert can_edit() == edits


async def test_lines_of_a_pipe_are_messages_or_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = "x" * (1 << 19) + "\n"
    (tmp_path / "typed").write_text(f'one\n"""two\n\nthree"""\n/reset\n"""{long}{long}{long}end"""\n"""four\nfive\n')
    with (tmp_path / "typed").open() as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        messages = LineMessages()
        found = [await messages.next() for _ in range(3)]
        assert found == [Message("one"), Message("two\n\nthree"), Message("/reset", is_command=True)]
        with pytest.raises(ConfigError, match="a message has more than 1 MiB: give a shorter one"):
            await messages.next()
        with pytest.raises(ConfigError, match='began has no end: end its last line with """'):
            await messages.next()
        assert await messages.next() is None


async def test_a_person_edits_recalls_and_pastes() -> None:
    async with program(60, [sys.executable, "-c", TALKS]) as (terminal, process):
        sees = Sees(terminal)
        await sees.prompt("up")
        terminal.press("wrold\x1b[D\x1b[D\x1b[D\x7f\x1b[Cr\x01hello \x05!\r")
        await sees.prompt("message 'hello world!'")
        terminal.press(PASTE + FUNCTION + PASTED)
        await sees("> def f(x):", "...     return x")
        assert "message 'def" not in terminal.text  # until Enter
        terminal.press("\r")
        await sees.prompt(r"message 'def f(x):\n    return x'")
        terminal.press(UP * 3 + "?\r")  # from the last line of a message of two
        await sees.prompt("message 'hello world!?'")
        terminal.press(UP * 5 + "\x17late\r")
        await sees.prompt("message 'late'")
        terminal.press('"""/one\r')
        await sees('> """/one', "... ")
        terminal.press('two"""\r')
        await sees.prompt(r"message '/one\ntwo'")
        terminal.press(PASTE + "/etc\r/usr" + PASTED + "\r/stats\r")
        await sees.prompt(r"message '/etc\n/usr'", "command '/stats'")
        terminal.press("\x12lat")
        await sees("`lat': late")
        terminal.press("\r\r")
        await sees.prompt("message 'late'", times=2)
        terminal.press(PASTE + "\x1b[2J\u202ea\x9b日本\x07" + PASTED)
        await sees("> ^[[2J?a<9b>日本^G")
        terminal.press("\x03")
        await terminal.until(lambda text: "^G" not in text)
        terminal.press(b"J\xfcrgen\r")
        await sees.prompt("refused: the message is no text in UTF-8 (byte 1): convert it")
        terminal.press("sleep\r")
        await sees("message 'sleep'")
        terminal.press("ahead\nmore")
        await sees("message 'ahead'", "> more")
        terminal.press("\x04\x03")  # neither ends while there is text
        await terminal.until(lambda text: "> more" not in text)
        terminal.press("\x04")
        await sees("over")
        assert await trio.to_thread.run_sync(process.wait, 60) == 0


class Sees:
    """A wait for words on a terminal."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    async def __call__(self, *words: str, times: int = 1) -> None:
        await self._terminal.until(lambda text: all(text.count(word) >= times for word in words))

    async def prompt(self, *words: str, times: int = 1) -> None:
        """Wait for them and an empty prompt: then keys are no longer the terminal's own."""
        await self(*words, times=times)
        await self._terminal.until(lambda text: text.rstrip().endswith(">"))


@pytest.mark.parametrize(("keys", "code"), [("\x03", 0), (signal.SIGTERM, 143)], ids=str)
async def test_what_ends_a_prompt_leaves_the_terminal_as_it_was(keys: str | signal.Signals, code: int) -> None:
    async with program(20, [sys.executable, "-c", TALKS]) as (terminal, process):
        sees = Sees(terminal)
        await sees.prompt("up")
        if isinstance(keys, str):
            terminal.press(keys)
        else:
            terminal.press("half")
            await sees("> half")
            process.send_signal(keys)
        assert await trio.to_thread.run_sync(process.wait, 60) == code
        flags = termios.tcgetattr(terminal.keyboard)[3]
        assert all(flags & flag for flag in (termios.ICANON, termios.ECHO, termios.ISIG))


@pytest.mark.parametrize("has_control", [True, False])
def test_a_terminal_that_goes_away_ends_the_prompt(has_control: bool) -> None:
    with losable_terminal(sys.executable, "-c", TALKS, has_control=has_control) as terminal:
        terminal.until("up", "\x1b[?2004h")
        os.write(terminal._ours, b"half")
        terminal.until("half")
        terminal.lose()
        assert terminal.process.wait(60) == (128 + signal.SIGHUP if has_control else 0)
