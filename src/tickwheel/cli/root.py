"""The tree of commands, and the one place where errors become a line and an exit code.

To add a command: write it in a module of its own, under the module's own name, and list it in
COMMANDS. Root help and shell completion import all of these modules, so they leave apps, stores
and asyncio to the functions that use them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from tickwheel.cli.options import HELP, Group
from tickwheel.cli.output import (
    CHILD_USAGE,
    FAILURE,
    INTERRUPTED,
    NOT_FOUND,
    OK,
    STORE,
    USAGE,
    complain,
)
from tickwheel.errors import JobUnknown, StoreError, TickwheelError, UsageError
from tickwheel.version import __version__

COMMANDS = (
    "dev",
    "worker",
    "jobs",
    "dead",
    "queues",
    "schedules",
    "workers",
    "explain",
    "top",
    "doctor",
    "config",
    "migrate",
    "migrate-jobs",
    "outbox",
    "nats",
    "demo",
)


class _Tree(Group):
    """Imports a command when it is asked for, so that none waits for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"tickwheel.cli.{name}"), name)
        return command


@click.group(
    "tickwheel",
    cls=_Tree,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": HELP, "show_default": True},
    epilog='Completion for bash: eval "$(_TICKWHEEL_COMPLETE=bash_source tickwheel)"',
)
@click.version_option(
    __version__, message="%(prog)s %(version)s", help="Print the version and exit."
)
@click.pass_context
def tree(context: click.Context) -> None:
    """Runs jobs at the time you asked for, and shows what became of them."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code. What a user got wrong is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    code = _main(argv)
    return CHILD_USAGE if code == USAGE and "--parent" in argv else code


def _main(argv: Sequence[str]) -> int:
    if (word := next((each for each in argv if not _is_text(each)), None)) is not None:
        complain(f"{word!r} is not valid UTF-8; give ids, names and URLs in UTF-8")
        return USAGE
    try:
        # Its own mode prints several lines and exits by itself; that is for us to decide.
        code = tree.main(argv, prog_name="tickwheel", standalone_mode=False)
    except click.ClickException as error:
        complain(_words(error) + _where_help_is(error))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        complain("interrupted")
        return INTERRUPTED
    except (TickwheelError, ExceptionGroup) as raised:
        cause = _innermost(raised)
        if not isinstance(cause, TickwheelError):
            raise
        complain(str(cause))
        return _code(cause)
    return code if isinstance(code, int) else OK


def _is_text(word: str) -> bool:
    """Whether it was UTF-8: other bytes arrive here as lone surrogates, which no store can keep."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _code(error: TickwheelError) -> int:
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, JobUnknown):
        return NOT_FOUND
    return STORE if isinstance(error, StoreError) else FAILURE


def _innermost(error: Exception) -> Exception:
    """What a group of one is about; task groups wrap whatever goes through them."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _words(error: click.ClickException) -> str:
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    # Each version of click says this in other words.
    words = f"No such option: {error.option_name}"
    close = ", ".join(sorted(error.possibilities or ()))
    return f"{words} (Possible options: {close})" if close else words


def _where_help_is(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f" (see {context.command_path} --help)" if context is not None else ""
