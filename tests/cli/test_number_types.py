"""No command takes a number that is none, or one without a bound."""

from __future__ import annotations

import click
import pytest

from cli.commands import command_summaries
from cli.main import group
from cli.options import Number


@pytest.mark.parametrize("name", command_summaries())
def test_every_number_is_finite_and_in_a_range(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    for param in command.params:
        kind = param.type
        if isinstance(kind, (type(click.FLOAT), type(click.INT))):
            assert isinstance(kind, (Number, click.IntRange)), f"{param.name}: of type Number or IntRange"
            assert kind.min is not None and kind.max is not None and kind.max < 1 << 64, param.name
