"""The command tree, and the one place where errors become a line and an exit code.

To add a command, write it in a module of the same name and list it in COMMANDS. Root help and shell
completion import all of these modules, so they import apps, stores and asyncio only inside the
functions that use them.
"""

from __future__ import annotations

import errno
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
    set_up_streams,
    silence,
)
from tickwheel.errors import StoreError, TickwheelError, UsageError
from tickwheel.masking import scrubbed
from tickwheel.version import __version__

COMMANDS = (
    "dev",
    "worker",
    "serve",
    "tasks",
    "jobs",
    "dead",
    "queues",
    "schedules",
    "workers",
    "keys",
    "audit",
    "explain",
    "verify",
    "top",
    "doctor",
    "config",
    "migrate",
    "migrate-jobs",
    "outbox",
    "nats",
    "bench",
    "score",
    "demo",
)


# Why stdout may be of no use; click itself handles a pipe that nobody reads.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class _Tree(Group):
    """Imports a command when it is used, so that no command waits for the others."""

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
    """Run jobs at the time you choose, and see how they went."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's mistake is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    set_up_streams()
    code = _main(argv)
    return CHILD_USAGE if code == USAGE and "--parent" in argv else code


def _main(argv: Sequence[str]) -> int:
    if (word := next((each for each in argv if not _is_text(each)), None)) is not None:
        complain(f"{scrubbed(word)!r} is not valid UTF-8; ids, names and URLs must be UTF-8")
        return USAGE
    try:
        # click's standalone mode prints several lines and exits; we handle errors ourselves.
        code = tree.main(argv, prog_name="tickwheel", standalone_mode=False)
    except click.ClickException as error:
        complain(scrubbed(_words(error)) + _where_help_is(error))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        complain("interrupted")
        return INTERRUPTED
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        silence(sys.stdout)
        complain(f"the output can't be written: {error.strerror}")
        return FAILURE
    except (TickwheelError, ExceptionGroup) as raised:
        cause = _innermost(raised)
        if not isinstance(cause, TickwheelError):
            raise
        complain(str(cause))
        return _code(cause)
    return code if isinstance(code, int) else OK


def _is_text(word: str) -> bool:
    """Whether it is UTF-8: other bytes arrive as lone surrogates, which no store can keep."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _code(error: TickwheelError) -> int:
    # An unknown job, task or schedule.
    if isinstance(error, LookupError):
        return NOT_FOUND
    if isinstance(error, UsageError):
        return USAGE
    return STORE if isinstance(error, StoreError) else FAILURE


def _innermost(error: Exception) -> Exception:
    """The only error inside nested groups; task groups wrap every error."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _words(error: click.ClickException) -> str:
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    # The wording differs between versions of click.
    words = f"No such option: {error.option_name}"
    close = ", ".join(sorted(error.possibilities or ()))
    return f"{words} (Possible options: {close})" if close else words


def _where_help_is(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f" (see {context.command_path} --help)" if context is not None else ""
