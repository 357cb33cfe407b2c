"""What an operator's step achieved, job by job, and the exit code that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import typer

from tickwheel.cli.codes import CONFLICT, NOT_FOUND, OK
from tickwheel.cli.output import Column, Output, emit_json, show_table


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one job: a stable word for programs, and words for people."""

    id: str
    outcome: str
    words: str
    code: int = OK

    @classmethod
    def unknown(cls, id: str) -> Answer:
        return cls(id, "unknown", "unknown: no job has this id", NOT_FOUND)


def report(answers: Sequence[Answer], output: Output) -> None:
    """Print each answer, and exit with the code of the worst."""
    if output is Output.JSON:
        emit_answers(answers)
    else:
        show_table(
            [Column("ID"), Column("OUTCOME", whole=False)],
            [(answer.id, (answer.words, "red" if answer.code else "")) for answer in answers],
        )
    raise typer.Exit(worst(answers))


def emit_answers(answers: Sequence[Answer]) -> None:
    emit_json({"jobs": [{"id": each.id, "outcome": each.outcome} for each in answers]})


def worst(answers: Sequence[Answer]) -> int:
    """Not found before conflict: a wrong id is the likelier slip."""
    codes = {answer.code for answer in answers}
    return next((code for code in (NOT_FOUND, CONFLICT) if code in codes), OK)
