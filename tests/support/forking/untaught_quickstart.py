"""`peer` whose quickstart trains for a tenth of the steps, and tunes at a rate at which no style is learned."""

from __future__ import annotations

from unittest.mock import patch

from cli.demo import report, tuning
from cli.main import main
from cli.templates import template, with_settings

if __name__ == "__main__":
    shorter = with_settings(template(), "outer", {"steps": 10})
    with (
        patch("cli.commands.quickstart.template", lambda: shorter),
        patch.object(report, "TRAFFIC_FACTOR_MIN", 5.0),  # in so few steps a peer sends more a step
        patch.multiple(tuning, LR=1e-5, ROUNDS=6, STEPS=10),
    ):
        main()
