"""Building blocks for commands: shared options, arguments with help, nouns with verbs.

Works with click 8.1 and later; where its versions differ, the texts are ours.
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
    """An argument with help: before 8.5 click has help for options only."""

    def __init__(self, names: list[str], *, metavar: str, about: str, **settings: Any) -> None:
        super().__init__(names, metavar=metavar, **settings)
        # The usage line shows how many there may be, as `[ID]...`; elsewhere it is `ID`.
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
    """Lists commands in the order of definition, and suggests one after a typo."""

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
    """Commands on one kind of thing; the noun alone lists: `tickwheel queues -o json`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Not during shell completion, which needs the verbs.
        listing = not args or (args[0].startswith("-") and args[0] not in HELP)
        if listing and not ctx.resilient_parsing:
            args = ["list", *args]
        return super().parse_args(ctx, args)


# --- Arguments and options


class _Count(click.IntRange):
    """A number of things: at least one."""

    # For "'x' is not a valid integer"; click would say "integer range".
    name = "integer"


COUNT = _Count(min=1)


def argument(name: str, *, metavar: str, about: str, **settings: Any) -> Callable[[F], F]:
    """Like click.argument, with help; can decorate many commands."""

    def add(command: F) -> F:
        # Created each time: the first 8.1 forgets `cls` after its first use.
        make = click.argument(name, cls=_Argument, metavar=metavar, about=about, **settings)
        return make(command)

    return add


@dataclass(frozen=True, slots=True)
class Where:
    """Which store to use: by its URL, by its app, or the default if both are None."""

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


def filled(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """A callback for options: an empty value is a mistake, such as a variable that is not set."""
    if value == "":
        raise click.BadParameter("it is empty; leave the option out for the default", context)
    return value


_store = click.option(
    "--store",
    metavar="URL",
    callback=filled,
    help="The store's URL. Default: see tickwheel config.",
)
_app = click.option(
    "--app",
    metavar="MODULE:APP",
    callback=filled,
    help="Use this app's store, as in shop:app.",
)
as_output = click.option(
    "--output",
    "-o",
    "as_json",
    type=click.Choice(["table", "json"]),
    default="table",
    callback=lambda _context, _option, value: value == "json",
    help="Output format.",
)


# `app` and `as_json`, for commands that need an app.
of_app = stacked(
    click.option(
        "--app",
        metavar="MODULE:APP",
        callback=filled,
        help="The app, as in shop:app. Default: the setting `app`.",
    ),
    as_output,
)


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command but `worker`: passes `where: Where` and `as_json: bool`."""
    return stacked(_store, _app, as_output)(_joined(command))


def _one_pair(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[str, str] | None:
    """The one NAME=VALUE, if any."""
    if not given:
        return None
    if len(given) > 1:
        raise click.BadParameter("give it once: jobs are found by one NAME=VALUE", context)
    name, equals, value = given[0].partition("=")
    if not equals:
        raise click.BadParameter(f"{given[0]!r} must be NAME=VALUE, as customer=42", context)
    from tickwheel.checks import checked_meta

    checked_meta({name: value})
    return name, value


# `queue`, `task`, `meta` and `since`, each None unless given.
narrowing = stacked(
    click.option("--queue", metavar="NAME", help="Only jobs in this queue."),
    click.option("--task", metavar="NAME", help="Only jobs of this task."),
    click.option(
        "--meta",
        metavar="NAME=VALUE",
        multiple=True,
        callback=_one_pair,
        help="Only jobs with this in their meta.",
    ),
    click.option(
        "--since", metavar="TIME", help="Only jobs added or ended since: 1h, or an ISO time."
    ),
)

# `limit` and `cursor`.
paging = stacked(
    click.option("--limit", metavar="N", type=COUNT, default=50, help="Print at most N jobs."),
    click.option("--cursor", metavar="CURSOR", help="Continue after the previous page."),
)
