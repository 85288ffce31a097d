"""`peer` whose quickstart trains for a quarter of the steps, half as large; all else is as a user has it (`make soak`
trains more)."""

from __future__ import annotations

from unittest.mock import patch

from cli.main import main
from cli.templates import template, with_settings

if __name__ == "__main__":
    whole = template()
    shorter = with_settings(with_settings(whole, "outer", {"steps": 25}), "inner", {"batch_size": 4})
    with patch("cli.commands.quickstart.template", lambda: shorter):
        main()
