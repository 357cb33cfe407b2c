"""For every suite: tests may be coroutines, and `h` is each store in turn."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from chromium import found_chromium, running_chromium
from ending import run_ends
from stores import KNOWN, STORES, TIMELESS, Harness, chosen

# Where a script runs us in the background its shell has Ctrl-C ignored, and programs that we start
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# For planted faults (`make mutants`): that a failure is found matters, not its shortest story.
settings.register_profile("find", phases=[Phase.explicit, Phase.generate])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stores", default=STORES, help="which stores to test, of: " + ",".join(KNOWN)
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`h` is an open store; `timeless` the name of one for which time is an argument."""
    try:
        names = chosen(metafunc.config.getoption("stores"))
    except ValueError as error:
        raise pytest.UsageError(f"--stores: {error}") from None
    if "h" in metafunc.fixturenames:
        metafunc.parametrize("h", names, indirect=True)
    if "store_name" in metafunc.fixturenames:
        metafunc.parametrize("store_name", names)
    if "timeless" in metafunc.fixturenames:
        metafunc.parametrize("timeless", [name for name in names if name in TIMELESS])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first, after the shuffle: at the end, the others would wait for them."""
    items.sort(key=lambda item: "model" not in item.path.parts)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of one test: fixtures may use it before and after the test does."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def h(request: pytest.FixtureRequest, runner: asyncio.Runner, tmp_path: Path) -> Iterator[Harness]:
    harness = KNOWN[request.param](tmp_path)
    runner.run(harness.open())
    yield harness
    runner.run(harness.close())


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    """The address of a Chromium, one for each process that runs tests."""
    program = found_chromium()
    if program is None:
        pytest.fail(
            "Chromium is missing: apt-get install chromium, or name it in TICKWHEEL_TEST_CHROMIUM"
        )
    with running_chromium(program) as address:
        yield address


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in the loop of its fixtures where they have one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    shared = pyfuncitem.funcargs.get("runner")
    if isinstance(shared, asyncio.Runner):
        shared.run(test)
    else:
        asyncio.run(test)
    return True


def pytest_sessionfinish() -> None:
    run_ends()
