"""What commands are made of: options that many share, arguments with help, nouns with verbs.

Written for every click from 8.1 on: where its versions differ, the words are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import click

HELP = ["-h", "--help"]

F = TypeVar("F", bound=Callable[..., Any])


# --- Kinds of commands


class _Argument(click.Argument):
    """An argument that says what it is: click has help for options alone before 8.5."""

    def __init__(self, names: list[str], *, metavar: str, about: str, **settings: Any) -> None:
        super().__init__(names, metavar=metavar, **settings)
        # The usage line says how many there may be, as `[ID]...`; elsewhere it is `ID`.
        self.title = metavar.strip("[].")
        self.about = about

    def get_error_hint(self, ctx: click.Context | None) -> str:
        return repr(self.title)


class Verb(click.Command):
    """A command that does something; its help lists arguments, then options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        arguments = [
            (each.title, each.about) for each in self.get_params(ctx) if isinstance(each, _Argument)
        ]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        super().format_options(ctx, formatter)


class Group(click.Group):
    """Commands in the order in which they were written; a slip is answered with a guess."""

    command_class = Verb

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            from difflib import get_close_matches

            close = ", ".join(map(repr, get_close_matches(name, self.list_commands(ctx))))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {close}?" if close else ""))
        return super().resolve_command(ctx, args)


class Noun(Group):
    """Commands about one kind of thing; the noun alone lists: `tickwheel queues -o json`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Not while a shell asks for completions: it wants to see the verbs.
        listing = not args or (args[0].startswith("-") and args[0] not in HELP)
        if listing and not ctx.resilient_parsing:
            args = ["list", *args]
        return super().parse_args(ctx, args)


# --- Arguments and options


class _Count(click.IntRange):
    """A number of things: at least one."""

    # In "'x' is not a valid integer", where click would say "integer range".
    name = "integer"


COUNT = _Count(min=1)


def argument(name: str, *, metavar: str, about: str, **settings: Any) -> Callable[[F], F]:
    """As click.argument, with help; can decorate many commands."""

    def add(command: F) -> F:
        # Made anew each time: the first 8.1 forgets `cls` once it was used.
        make = click.argument(name, cls=_Argument, metavar=metavar, about=about, **settings)
        return make(command)

    return add


@dataclass(frozen=True, slots=True)
class Where:
    """Which store was meant: by its URL, by its app, or the default where both are None."""

    store: str | None
    app: str | None


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several decorators as one; help lists options in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _joined(command: F) -> Callable[..., Any]:
    @wraps(command)
    def joined(*, store: str | None, app: str | None, **rest: Any) -> Any:
        return command(where=Where(store, app), **rest)

    return joined


_store = click.option(
    "--store",
    metavar="URL",
    help="The store, as a URL. Default: see tickwheel config.",
)
_app = click.option("--app", metavar="MODULE:APP", help="The app whose store it is, as shop:app.")
as_output = click.option(
    "--output",
    "-o",
    "as_json",
    type=click.Choice(["table", "json"]),
    default="table",
    callback=lambda _context, _option, value: value == "json",
    help="How to print: for people or for programs.",
)


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """What every command but `worker` has: gives it `where: Where` and `as_json: bool`."""
    return stacked(_store, _app, as_output)(_joined(command))


# `queue` and `task`, each None unless given.
narrowing = stacked(
    click.option("--queue", metavar="NAME", help="Only jobs of this queue."),
    click.option("--task", metavar="NAME", help="Only jobs of this task."),
)

# `limit` and `cursor`.
paging = stacked(
    click.option(
        "--limit", metavar="N", type=COUNT, default=50, help="Print at most so many jobs."
    ),
    click.option("--cursor", metavar="CURSOR", help="Go on where the page before ended."),
)
