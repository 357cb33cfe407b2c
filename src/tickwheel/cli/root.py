"""The tree of commands, and the one place where errors become a line and an exit code.

To add a command: write it in a module of its own and hang it on `tree` here. These modules are
all imported whatever the command is, so they import apps, stores and asyncio where they use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from tickwheel.cli import dead, jobs, queues, worker
from tickwheel.cli.codes import FAILURE, INTERRUPTED, NOT_FOUND, OK, STORE, USAGE
from tickwheel.cli.options import HELP
from tickwheel.cli.output import complain
from tickwheel.errors import JobUnknown, StoreError, TickwheelError, UsageError
from tickwheel.version import __version__

tree = typer.Typer(
    name="tickwheel",
    help="Runs jobs at the time you asked for, and shows what became of them.",
    invoke_without_command=True,
    # Plain text: it reads well in a pipe too, and starts faster than boxes.
    rich_markup_mode=None,
    context_settings={"help_option_names": HELP},
)
tree.command("worker")(worker.worker)
tree.add_typer(jobs.noun, name="jobs")
tree.add_typer(dead.noun, name="dead")
tree.add_typer(queues.noun, name="queues")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tickwheel {__version__}")
        raise typer.Exit


@tree.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code. What a user got wrong is one line on stderr."""
    command = typer.main.get_command(tree)
    try:
        # Its own mode prints boxes and exits by itself; a line and a code are for us to decide.
        code = command.main(argv, prog_name="tickwheel", standalone_mode=False)
    except typer.TyperException as error:
        complain(error.format_message().replace("Value error, ", "") + _where_help_is(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return INTERRUPTED
    except (TickwheelError, ExceptionGroup) as raised:
        cause = _innermost(raised)
        if not isinstance(cause, TickwheelError):
            raise
        complain(str(cause))
        return _code(cause)
    return code if isinstance(code, int) else OK


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


def _where_help_is(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f" (see {context.command_path} --help)" if context is not None else ""
