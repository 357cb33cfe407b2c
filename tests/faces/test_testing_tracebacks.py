"""What a box shows of a failed run."""

from __future__ import annotations

import re
from types import TracebackType

import pytest

from tickwheel import App
from tickwheel.testing import sandbox


def charge() -> None:
    raise ValueError("no such order")


def modules(traceback: TracebackType | None) -> list[str]:
    """The modules of a traceback, each once in a row."""
    names: list[str] = []
    while traceback is not None:
        name = traceback.tb_frame.f_globals["__name__"].split(".")[0]
        names += [name] if names[-1:] != [name] else []
        traceback = traceback.tb_next
    return names


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_failed_run_shows_the_frames_of_its_task(kind: str) -> None:
    app = App("memory://")

    @app.task
    def plain() -> None:
        charge()

    @app.task(name="async")
    async def on_loop() -> None:
        charge()

    with sandbox(app) as box:
        (plain if kind == "plain" else on_loop).enqueue_sync()
        [run] = box.drain()
        [job] = box.jobs()
    names = re.findall(r", in (?:\S+\.)?(\w+)\n", run.traceback or "")
    assert names == ["plain" if kind == "plain" else "on_loop", "charge"]
    assert job.traceback == run.traceback
    assert run.exception is not None
    assert modules(run.exception.__traceback__) == [__name__.split(".")[0]]


async def test_so_does_the_exception_that_a_box_raises() -> None:
    app = App("memory://")

    @app.task
    async def pay() -> None:
        charge()

    async with sandbox(app, raise_errors=True) as box:
        await pay.enqueue()
        with pytest.raises(ValueError, match="no such order") as caught:
            await box.drain()
    # Ours are the ones that raise it in the test; then come those of the task.
    here = __name__.split(".")[0]
    assert modules(caught.value.__traceback__) == [here, "tickwheel", here]
