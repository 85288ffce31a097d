"""Builds a merge rule from the manifest's method section."""

from __future__ import annotations

from typing import Final

from optim.config import DilocoConfig, OuterConfig, StreamingConfig
from optim.rules.flag import FlagRule
from optim.rules.interface import MeanRule, MergeRule
from optim.rules.trimmed import MEDIAN, TrimmedMeanRule

MEAN: Final[MergeRule] = MeanRule()


def build_rule(method: OuterConfig) -> MergeRule:
    """Return the rule of `[outer] merge`; the mean for a method that has no such setting."""
    if not isinstance(method, DilocoConfig | StreamingConfig):
        return MEAN
    match method.merge:
        case "mean":
            return MEAN
        case "trimmed_mean":
            return TrimmedMeanRule(method.trim)
        case "median":
            return TrimmedMeanRule(MEDIAN)
        case "flag":
            return FlagRule()
