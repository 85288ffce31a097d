"""`peer data`: build, describe and check data sets of pages.

A data set is built once and trained on by many runs: peers fetch the pages that they need from each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

import click

from cli.combinations import check_words
from cli.terminal.lines import say
from cli.terminal.usage import nearest

_COMMANDS: Final = ("build", "show", "verify")


class DataGroup(click.Group):
    """A click group that imports one of its commands only to run or describe it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"{__name__}.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = nearest(args[0], _COMMANDS)
            meant = f"write `peer data {near}`, or " if near else ""
            raise click.UsageError(f"`peer data` has no command {args[0]}: {meant}see `peer data --help`", ctx)
        name, command, words = super().resolve_command(ctx, args)
        if command is not None:
            check_words(command, ctx, words)
        return name, command, words


@click.group(cls=DataGroup, invoke_without_command=True)
@click.pass_context
def data(context: click.Context) -> None:
    """Build a data set of pages from text, describe one, or check one."""
    if context.invoked_subcommand is None:
        _say_lines(context.get_help().splitlines())


def _say_lines(lines: Sequence[str]) -> None:
    say(*lines, uncut=True)
