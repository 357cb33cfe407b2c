"""The pytest plugin, found by its entry point: the fixture `tickwheel`.

It is an ordinary fixture: coroutine tests may use it under any asyncio plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.testing import Sandbox


@pytest.fixture
def tickwheel() -> Callable[..., Sandbox]:
    """`sandbox` of tickwheel.testing: `with tickwheel(app) as box`, or `async with`."""
    # Imported here, so that projects that don't use the fixture don't wait for it.
    from tickwheel.testing import sandbox

    return sandbox
