"""A task in its own process that enqueues others: the child imports this module."""

from __future__ import annotations

import os
from typing import Any

from tickwheel import App, Job

app = App(os.environ.get("TICKWHEEL_TEST_URL", "memory://"))


@app.on_enqueue
def trace(job: Job) -> dict[str, str]:
    return {"from": "child"}


@app.task
async def child() -> None: ...


@app.task(pool="process")
def parent() -> list[Any]:
    """The meta of a job that is made, and the id of one that is enqueued: asked to inherit, and
    not."""
    call = child.using(inherit_meta=True)
    return [call.job().meta, call.enqueue_sync().id, child.job().meta, child.enqueue_sync().id]
