"""A passphrase that a person types unseen, or a line of standard input where no person is at the terminal."""

from __future__ import annotations

import sys
from typing import Final

import click

from cli.terminal.typed_lines import decoded
from peer.errors import ConfigError

BYTES_MAX: Final = 1024


def ask_passphrase(of: str, confirmed: bool = False) -> str:
    """Ask for the passphrase of what `of` names; `confirmed`: ask twice, and repeat until both are the same.

    Raises ConfigError for one that is no text."""
    if not sys.stdin.isatty():
        return decoded(sys.stdin.buffer.readline(BYTES_MAX), "the passphrase").rstrip("\r\n")
    try:
        typed: str = click.prompt(f"Passphrase of {of}", hide_input=True, confirmation_prompt=confirmed, err=True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"the passphrase is no text in {error.encoding}: type it again in this terminal") from error
    return typed
