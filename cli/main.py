"""The command `peer`: a lazy group, so that `peer --help` imports nothing heavier than click.

Exit codes are those of `peer.errors` (README): 0 success, 1 a bug, 2 usage, 3 network, 4 not admitted, 5 this machine,
6 checkpoint, 7 training, 128 + the signal's number if one ended it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final

import click

from cli.packages import check_packages
from cli.run import report_failure
from peer.errors import ConfigError

COMMANDS: Final = {
    "quickstart": "Several peers on this machine train a small model.",
    "coordinate": "Found a run from a RUN.toml; prints the invite.",
    "join": "Take part in a run with this machine.",
    "status": "Who is in a run, which round, how well it learns.",
    "export": "Write the last commit as a Hugging Face checkpoint.",
    "doctor": "What would keep this machine out, and the cure.",
    "relay": "Run a meeting point for peers behind NAT.",
}


class LazyGroup(click.Group):
    """Knows its commands' names and one line each; imports `cli.<name>` only to run or describe that command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`peer COMMAND --help` says more. Start with `peer quickstart`.",
)
@click.version_option(package_name="barnraise", prog_name="barnraise")
def group() -> None:
    """Barnraise: strangers' machines find each other and train one language model together."""


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError unless all are text: what is not UTF-8 can be neither printed nor sent."""
    for argument in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise ConfigError(f"{argument!a} is not UTF-8 text: write it anew in this terminal.")


def main() -> None:
    """Entry point of the console script: run, and turn whatever goes wrong into one sentence and an exit code."""
    try:
        check_packages()
        check_arguments(sys.argv[1:])
        code = group.main(prog_name="peer", standalone_mode=False)
    except BaseException as error:  # noqa: BLE001  the CLI edge: nothing leaves it but an exit code
        code = report_failure(error)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
