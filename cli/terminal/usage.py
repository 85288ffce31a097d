"""What click found wrong with the words of a command, as one sentence that ends with what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import click

NEAR = 0.6  # difflib's ratio from which a word is taken for a misspelling


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that was probably meant, or an empty string."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=NEAR)), "")


def usage_sentence(error: click.ClickException) -> str:
    """Return `what happened, with the value: what to do`."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = "peer" if context is None else context.command_path
    see = f"see `{command} --help`"
    if isinstance(error, click.NoSuchOption):
        near = nearest(error.option_name, _options(context))
        return f"`{command}` has no option {error.option_name}: {f'write {near}, or ' if near else ''}{see}"
    if isinstance(error, click.BadOptionUsage) and "does not take a value" in error.message:
        name = error.option_name
        return f"{name} takes no value: write {name} alone, {see}"
    if isinstance(error, click.BadOptionUsage):
        return f"{_lower(error.message)}: write its value after it, {see}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"`{command}` was given no {named(error.param)}: add it, {see}"
    if isinstance(error, click.BadParameter) and error.param is not None:
        what = f"{named(error.param)} {_in_words(_lower(error.message))}"
        return what if ": " in what else f"{what}: {_remedy(error.param.type, error.message) or see}"
    what = _lower(error.format_message())
    return what if ": " in what else f"{what}: {see}"


def _in_words(message: str) -> str:
    """Return click's sentence about a value with no name of a type of click's in it."""
    for type_, words in (("integer", "whole number"), ("float", "number")):
        message = message.removesuffix(" range").replace(f"is not a valid {type_}", f"is no {words}")
    return message


def _remedy(kind: click.ParamType[Any], message: str) -> str:
    if isinstance(kind, click.Choice):
        near = nearest(message.partition("'")[2].partition("'")[0], kind.choices)
        return f"write {near}" if near else "choose one of these"
    return "choose a number in it" if "in the range" in message else ""


def _options(context: click.Context | None) -> list[str]:
    return [] if context is None else [name for param in context.command.params for name in param.opts]


def named(param: click.Parameter) -> str:
    if isinstance(param, click.Option):
        return param.opts[0]
    return (param.metavar or param.human_readable_name).strip("[]")


def _lower(message: str) -> str:
    """Return click's sentence as ours begin and end."""
    first = message[:1] if message[1:2].isupper() else message[:1].lower()
    return (first + message[1:]).rstrip(".")
