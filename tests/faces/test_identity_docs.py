"""docs/identity.md is true: its examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tickwheel.testing import sandbox

PAGE = Path(__file__).parents[2] / "docs" / "identity.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL))


def loaded(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": name}
    exec(BLOCKS[name].replace("sqlite:///jobs.db", "memory://"), names)
    return names


async def test_a_customer_is_synchronised_once_after_the_last_change(capsys: Any) -> None:
    example = loaded("sync")
    async with sandbox(example["app"]) as box:
        assert await example["changed"](42) == "added"
        await box.travel("9s")
        assert await example["changed"](42) == "replaced"
        await box.travel("9s")
        assert capsys.readouterr().out == ""
        await box.travel("2s")
        assert capsys.readouterr().out == "synchronised 42\n"


async def test_a_job_is_postponed() -> None:
    example = loaded("moving")
    async with sandbox(example["app"]) as box:
        job = await example["remind"].using(delay="1m").enqueue(1)
        assert await example["postpone"](job)
        await box.travel("59m")
        assert (await job.info()).state == "waiting"
        await box.travel("2m")
        assert (await job.info()).state == "done"
