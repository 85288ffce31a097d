"""Options that count only beside others, or not beside them: what would be ignored is refused, and said."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.core import ParameterSource

from cli.terminal.usage import named


def is_given(name: str) -> bool:
    """Whether the user gave the parameter of that name on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_without(other: str, holds: bool, *names: str) -> None:
    """Raise UsageError for the first of these parameters that was given, unless `holds`: they count beside `other`."""
    if not holds:
        for word in _given(names):
            raise click.UsageError(f"{word} counts only beside {other}: give both, or leave {word} out")


def refuse_beside(other: str, holds: bool, *names: str, why: str = "") -> None:
    """Raise UsageError for the first of these parameters that was given, if `holds`: `other` makes no use of them."""
    if holds:
        for word in _given(names):
            reason = why or f"{other} makes no use of {word}"
            raise click.UsageError(f"{word} and {other} were both given, and {reason}: leave one of them out")


def refuse(why: str, *names: str) -> None:
    """Raise UsageError for the first of these parameters that was given."""
    for word in _given(names):
        raise click.UsageError(f"{word} has no effect, as {why}: leave it out")


def refuse_others(alone: str, *kept: str) -> None:
    """Raise UsageError for a parameter that was given beside `alone`, other than it and those `kept`."""
    names = [str(param.name) for param in click.get_current_context().command.params]
    refuse_beside(alone, True, *(name for name in names if name not in kept))


def check_one_source(what: str, *sources: str) -> None:
    """Raise UsageError unless exactly one of these parameters was given: each names `what`."""
    words = [_word(name) for name in sources]
    given = [_word(name) for name in sources if is_given(name)]
    if not given:
        raise click.UsageError(f"no {what} was named: give either {' or '.join(words)}")
    if len(given) > 1:
        raise click.UsageError(
            f"{' and '.join(given)} were both given, and each names the {what}: leave one of them out"
        )


def check_words(command: click.Command, context: click.Context, words: list[str]) -> None:
    """Raise UsageError for an empty value of an option or argument. It usually comes from an unset variable, and as a
    path it would mean the current folder."""
    inner = click.Context(command, info_name=command.name, parent=context)
    values, _, _ = command.make_parser(inner).parse_args(list(words))
    for param in command.params:
        value = values.get(str(param.name))
        if value == "" or (isinstance(value, (list, tuple)) and "" in value and not _is_broken(param, value)):
            word = named(param)
            raise click.UsageError(f"{word} is empty: write its value, or leave {word} out", inner)


def _is_broken(param: click.Parameter, value: Iterable[str]) -> bool:
    """Whether the words are one value that a terminal has broken."""
    return isinstance(param, click.Argument) and any(value)


def _given(names: Iterable[str]) -> list[str]:
    return [_word(name) for name in names if is_given(name)]


def _word(name: str) -> str:
    """Return a parameter as it is typed."""
    return named(next(param for param in click.get_current_context().command.params if param.name == name))
