"""The command `peer`: a lazy group, so that `peer --help` imports nothing heavier than click.

Exit codes are those of `peer.errors` (docs/use/cli.md): 0 success, 1 a bug, 2 usage, 3 network, 4 not admitted,
5 this machine, 6 checkpoint, 7 training, 128 + the signal's number if one ended it.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence

import click

from cli.combinations import check_words
from cli.commands import command_summaries
from cli.examples import epilog
from cli.packages import check_packages
from cli.run import report_failure
from cli.terminal.lines import plain_reports
from cli.terminal.standard_streams import flush_output, open_standard_streams, write
from cli.terminal.usage import nearest
from peer.confinement.kernel import forbid_core_dumps
from peer.errors import ConfigError


class LazyGroup(click.Group):
    """A click group that imports `cli.commands.<name>` only to run or describe that command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(command_summaries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in command_summaries():
            return None
        command = getattr(importlib.import_module(f"cli.commands.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        command.epilog = epilog(cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[:1] == ["help"]:
            return self._help_of(ctx, args[1:])
        if args and args[0] not in command_summaries() and not args[0].startswith("-"):
            near = nearest(args[0], command_summaries())
            meant = f"write `peer {near}`, or " if near else ""
            raise click.UsageError(f"`peer` has no command {args[0]}: {meant}see `peer --help`", ctx)
        name, command, words = super().resolve_command(ctx, args)
        if command is not None:
            check_words(command, ctx, words)
        return name, command, words

    def _help_of(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return what `peer help` asks for: the help of the command that is named, or that of all."""
        if len(args) > 1:
            raise click.UsageError(f"`peer help` takes one command and was given {len(args)}: name one", ctx)
        if args:
            return self.resolve_command(ctx, [args[0], "--help"])
        return "help", click.Command("help", callback=lambda: write(f"{ctx.get_help()}\n")), []

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(command_summaries().items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`peer help COMMAND` describes a command, with examples. Start with `peer quickstart`.",
    invoke_without_command=True,
)
@click.version_option(package_name="barnraise", prog_name="barnraise")
@click.pass_context
def group(context: click.Context) -> None:
    """Barnraise: train one language model on volunteers' machines over the internet."""
    if context.invoked_subcommand is None:
        write(f"{context.get_help()}\n")


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError unless all arguments are UTF-8, so that they can be printed and sent."""
    for argument in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise ConfigError(f"{argument!a} is not UTF-8 text: type it again in this terminal")


def main() -> None:
    """Run the console script; turn every failure into one sentence and an exit code."""
    open_standard_streams()
    gc.disable()  # until the imports are done (`cli.run`): a fifth of their time would go into looking for garbage
    try:
        check_packages()
        forbid_core_dumps()  # this process will hold a key
        check_arguments(sys.argv[1:])
        with plain_reports():
            code = group.main(prog_name="peer", standalone_mode=False)
            flush_output()
    except BaseException as error:  # noqa: BLE001  the CLI edge: only an exit code leaves it
        code = report_failure(error)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
