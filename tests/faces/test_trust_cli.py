"""Commands on a store with sealed jobs, with the keys and without; no command shows a key."""

from __future__ import annotations

import asyncio

import pytest
from command_line import Cli, cli

from tickwheel import App, JobFailed
from tickwheel.trust import new_key

__all__ = ["cli"]

SIGN, ENCRYPT = new_key("s1"), new_key("e1")
SECRET = "4111-1111"


async def fill() -> None:
    app = App("sqlite:///jobs.db", signing_keys=[SIGN], encryption_keys=[ENCRYPT])

    @app.task(name="pay", retries=0)
    async def pay(card: str, fails: bool = False) -> str:
        if fails:
            raise ValueError(card)
        return card

    async with app, app.worker(guarded=False):
        await (await pay.using(id="paid").enqueue(SECRET)).result(timeout=30)
        with pytest.raises(JobFailed):
            await (await pay.using(id="failed").enqueue(SECRET, fails=True)).result(timeout=30)
        await app.schedules.put("daily", "pay", cron="0 2 * * *", arguments={"card": SECRET})


COMMANDS = (
    ("jobs", "show", "paid"),
    ("jobs", "show", "failed"),
    ("jobs", "show", "failed", "-o", "json"),
    ("jobs", "list"),
    ("jobs", "list", "-o", "json"),
    ("explain", "failed"),
    ("dead",),
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_shows_what_its_keys_open(
    cli: Cli, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(fill())
    without = cli(*words)
    assert without.code == 0 and "[encrypted]" in without.out, without
    assert SECRET not in without.out and "tickwheel:sealed" not in without.out
    monkeypatch.setenv("TICKWHEEL_SIGNING_KEYS", SIGN)
    monkeypatch.setenv("TICKWHEEL_ENCRYPTION_KEYS", ENCRYPT)
    with_keys = cli(*words)
    assert with_keys.code == 0 and SECRET in with_keys.out


def test_a_sealed_schedule_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(fill())
    said = cli("schedules", "list", "-o", "json")
    assert said.code == 0 and "it is sealed" in said.out and SECRET not in said.out
    monkeypatch.setenv("TICKWHEEL_SIGNING_KEYS", SIGN)
    monkeypatch.setenv("TICKWHEEL_ENCRYPTION_KEYS", ENCRYPT)
    assert "sealed" not in cli("schedules", "list", "-o", "json").out


def test_doctor_does_not_advise_to_delete_a_schedule_that_it_cannot_open(cli: Cli) -> None:
    asyncio.run(fill())
    said = cli("doctor", "-o", "json")
    assert "it is sealed, so this program can't tell whether it ticks" in said.out
    assert "delete it" not in said.out


@pytest.mark.parametrize("form", [(), ("-o", "json")])
def test_config_shows_the_ids_of_keys_and_nothing_else(
    cli: Cli, form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    id, _, secret = SIGN.partition(":")
    monkeypatch.setenv("TICKWHEEL_SIGNING_KEYS", f"{SIGN},{new_key('s2')}")
    # Written the wrong way round: nothing of it is shown.
    monkeypatch.setenv("TICKWHEEL_ENCRYPTION_KEYS", f"{secret}:{id}")
    said = cli("config", *form)
    assert said.code == 0 and "s1:***" in said.out and "s2:***" in said.out
    assert secret not in said.out + said.err
