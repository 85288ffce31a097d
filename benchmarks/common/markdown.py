"""Markdown of the results page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def number(value: float | None, digits: int) -> str:
    """Return the number with so many decimals; nothing for None."""
    return "" if value is None else f"{value:.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Return the number with so many significant digits, without an exponent."""
    return "" if value is None else f"{float(f'{value:.{digits}g}'):,.10g}"


def percent(share: float | None, digits: int) -> str:
    """Return a share in percent."""
    return "" if share is None else f"{100 * share:.{digits}f} %"


def scaled(value: float | str, by: float) -> str:
    """Return a number times `by`; a range stays as it is."""
    return value if isinstance(value, str) else f"{value * by:g}"


def span(values: Sequence[float], form: str) -> str:
    """Return the range of the values."""
    low, high = (form.format(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def yes(value: bool) -> str:
    """Return the words for a fact."""
    return "yes" if value else "no"
