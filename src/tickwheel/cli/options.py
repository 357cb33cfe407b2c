"""Options that many commands share, and how a noun alone means its list."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tickwheel.cli.output import Output

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="The store, as a URL. Default: TICKWHEEL_STORE, else sqlite:///tickwheel.db.",
    ),
]
AppOption = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:APP", help="The app whose store it is, as shop:app."),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="How to print: for people or for programs.")
]
QueueOption = Annotated[
    str | None, typer.Option("--queue", metavar="NAME", help="Only jobs of this queue.")
]
TaskOption = Annotated[
    str | None, typer.Option("--task", metavar="NAME", help="Only jobs of this task.")
]
LimitOption = Annotated[
    int, typer.Option("--limit", metavar="N", min=1, help="Print at most so many jobs.")
]
CursorOption = Annotated[
    str | None,
    typer.Option("--cursor", metavar="CURSOR", help="Go on where the page before ended."),
]


HELP = ["-h", "--help"]


class Noun(TyperGroup):
    """Commands about one kind of thing; the noun alone lists: `tickwheel queues -o json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Not while a shell asks for completions: it wants to see the verbs.
        listing = not args or (args[0].startswith("-") and args[0] not in HELP)
        if listing and not ctx.resilient_parsing:
            args = ["list", *args]
        return super().parse_args(ctx, args)
