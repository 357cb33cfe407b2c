"""Settings: which source wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tickwheel import App, BadConfig
from tickwheel.config import DEFAULT, NAMES, Settings, load, unknown_variables


def test_without_any_source_all_is_default(tmp_path: Path) -> None:
    config = load(environ={}, folder=tmp_path)
    assert config.settings == Settings()
    assert set(config.sources.values()) == {DEFAULT}
    assert not config.chosen("store")


def test_a_flag_beats_the_environment_beats_the_file_beats_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.tickwheel]\nlease = "1s"\ngrace = "1s"\nconcurrency = 1\nretention = "1d"\n'
    )
    (tmp_path / "tickwheel.toml").write_text('lease = "2s"\ngrace = "2s"\nconcurrency = 2\n')
    environ = {"TICKWHEEL_LEASE": "3s", "TICKWHEEL_GRACE": "3s", "TICKWHEEL_STORE": ""}
    config = load({"lease": "4s", "grace": None}, environ=environ, folder=tmp_path)
    settings = config.settings
    assert (settings.lease, settings.grace, settings.concurrency) == ("4s", "3s", 2)
    assert settings.retention == "1d"
    assert {
        name: config.sources[name] for name in ("lease", "grace", "concurrency", "retention")
    } == {
        "lease": "--lease",
        "grace": "TICKWHEEL_GRACE",
        "concurrency": "tickwheel.toml",
        "retention": "pyproject.toml",
    }
    # An empty variable is none.
    assert config.sources["store"] == DEFAULT


def test_settings_are_written_as_people_write_them(tmp_path: Path) -> None:
    (tmp_path / "tickwheel.toml").write_text(
        'queues = ["a", "b"]\nlease = 20\ndead-retention = "30d"\nlog_level = "WARNING"\n'
    )
    settings = load(environ={"TICKWHEEL_CONCURRENCY": "7"}, folder=tmp_path).settings
    assert settings.queues == ("a", "b")
    assert (settings.lease, settings.dead_retention) == ("20s", "30d")
    assert (settings.log_level, settings.concurrency) == ("warning", 7)
    assert load(environ={"TICKWHEEL_QUEUES": "a, b"}, folder=tmp_path).settings.queues == ("a", "b")
    for text, on in (("on", True), ("TRUE", True), ("no", False), ("0", False)):
        assert load(environ={"TICKWHEEL_METRICS": text}, folder=tmp_path).settings.metrics is on
    (tmp_path / "tickwheel.toml").write_text("metrics = false")
    assert load(environ={}, folder=tmp_path).settings.metrics is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('laese = "1s"', "tickwheel.toml has no setting 'laese'; did you mean lease?"),
        ('lease = "soon"', "tickwheel.toml: lease: 'soon' is not a duration"),
        (
            "concurrency = 0",
            "tickwheel.toml: concurrency: must be a whole number of at least 1, not 0",
        ),
        ("concurrency = true", "must be a whole number of at least 1, not True"),
        ("store = 1", "tickwheel.toml: store: must be a non-empty string"),
        ("queues = 1", "must be a list of names"),
        ('log_level = "loud"', "must be one of debug, info"),
        ('log_format = "xml"', "must be one of text, json"),
        ('metrics = "maybe"', "tickwheel.toml: metrics: must be true or false, not 'maybe'"),
        ("lease = ", "tickwheel.toml can't be read"),
    ],
)
def test_what_can_not_be_used_is_refused_with_its_place(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "tickwheel.toml").write_text(text)
    with pytest.raises(BadConfig) as error:
        load(environ={}, folder=tmp_path)
    assert words in str(error.value)


def test_a_variable_that_is_no_setting_is_found() -> None:
    known = {f"TICKWHEEL_{name.upper()}": "x" for name in NAMES}
    assert unknown_variables({**known, "TICKWHEEL_LAESE": "1", "PATH": ""}) == ["TICKWHEEL_LAESE"]


def test_an_app_takes_from_the_settings_what_its_code_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TICKWHEEL_STORE", raising=False)
    (tmp_path / "tickwheel.toml").write_text('store = "memory://"\nretention = "1s"\n')
    app = App()
    assert (app.url, app.retention_ms) == ("memory://", 1_000)
    assert App("sqlite:///a.db", retention="2s").retention_ms == 2_000


BROKEN = {"TICKWHEEL_LEASE": "garbage", "TICKWHEEL_CONCURRENCY": "-1"}


@pytest.fixture(params=["not toml [", 'laese = "1s"', "retention = []"])
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder and an environment whose settings can't be used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TICKWHEEL_STORE", raising=False)
    for name, value in BROKEN.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tickwheel.toml").write_text(request.param)
    return tmp_path


async def test_an_app_with_a_store_of_its_own_reads_no_settings_that_it_does_not_use(
    broken: Path,
) -> None:
    app = App("memory://", retention="1d", dead_retention="1d", outbox="sqlite:///shop.db")

    @app.task
    async def hello() -> str:
        return "hello"

    async with app, app.worker(guarded=False):
        assert await (await hello.enqueue()).result(timeout=10) == "hello"


async def test_an_app_with_a_store_of_its_own_can_add_jobs_whatever_the_settings_say(
    broken: Path,
) -> None:
    app = App("memory://")
    hello = app.task(name="hello")(lambda: None)
    async with app:
        assert (await hello.enqueue()).added


def test_an_app_without_a_store_of_its_own_checks_all_settings(broken: Path) -> None:
    with pytest.raises(BadConfig):
        App()


async def test_a_worker_reads_the_settings_that_its_app_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TICKWHEEL_LEASE", "garbage")
    (tmp_path / "tickwheel.toml").write_text('retention = "soon"\nlaese = 1\n')
    app = App("memory://")
    with pytest.raises(BadConfig, match=r"tickwheel.toml: retention: 'soon' is not a duration"):
        async with app.worker(guarded=False):
            pass
    (tmp_path / "tickwheel.toml").write_text('retention = "3s"\nlaese = 1\n')
    assert App("memory://").retention_ms == 3_000
    monkeypatch.setenv("TICKWHEEL_RETENTION", "2s")
    assert App("memory://").retention_ms == 2_000
