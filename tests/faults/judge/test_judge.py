"""Each store under random faults, judged from outside: `make judge SECONDS=600 SEED=7`."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from judge.load import wishes
from judge.run import JudgedRun
from judge.scenes import MORE, SCENES
from judge.verdict import by_rule

SECONDS = float(os.environ.get("JUDGE_SECONDS", "60"))
SEED = int(os.environ.get("JUDGE_SEED", "1"))
STORES = os.environ.get("JUDGE_STORES") or ",".join(SCENES)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 200)
@pytest.mark.parametrize("store", STORES.split(","))
async def test_none_is_lost_none_is_early_and_every_second_run_has_its_reason(
    store: str, tmp_path: Path
) -> None:
    scene = (SCENES | MORE)[store](tmp_path)
    run = JudgedRun(scene, tmp_path, seed=SEED, seconds=SECONDS)
    judgement = await run.run()
    planned = len(wishes(SEED, SECONDS, scene.ways))
    said = (
        f"{store}, seed {SEED}, {SECONDS:g} s: {judgement.acknowledged:,} of {planned:,} jobs "
        f"acknowledged, {judgement.runs:,} runs, {judgement.explained:,} of them second ones that "
        f"a fault explains; {dict(Counter(fault.kind for fault in run.plan))}; drained within "
        f"{run.drained_s:.0f} s; the machine was too busy for {run.busy_s:.1f} s"
    )
    print(said)
    if judgement.complaints:
        first = {complaint.rule: complaint.id for complaint in reversed(judgement.complaints)}
        stories = [f"{rule}: {run.story(id)}" for rule, id in first.items() if rule != "quit"]
        pytest.fail("\n".join([said, by_rule(judgement.complaints), *stories]))
    # Producers are killed, too, and miss what they would have enqueued meanwhile.
    assert judgement.acknowledged > planned * 0.5
