"""A passphrase that a person types unseen, or a line of standard input where no person is at the terminal."""

from __future__ import annotations

import sys
from typing import Final

import click

CHARACTERS_MAX: Final = 1024


def ask_passphrase(of: str, confirmed: bool = False) -> str:
    """Ask for the passphrase of what `of` names; `confirmed`: ask twice, and go on until both are the same."""
    if not sys.stdin.isatty():
        return sys.stdin.readline(CHARACTERS_MAX).rstrip("\r\n")
    passphrase: str = click.prompt(f"Passphrase of {of}", hide_input=True, confirmation_prompt=confirmed, err=True)
    return passphrase
