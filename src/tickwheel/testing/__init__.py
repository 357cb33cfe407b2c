"""For tests of programs that use Tickwheel, and for our own.

`sandbox(app)` gives an app a store in memory and a time of its own for the length of a test: see
docs/testing.md. Below it are an event loop whose time is virtual, which carries the engine itself,
and a store behind a bad line.
"""

from tickwheel.testing.box import Box, SyncBox
from tickwheel.testing.faults import FaultyStore
from tickwheel.testing.loop import VirtualLoop, run_virtual
from tickwheel.testing.running import BoxRun
from tickwheel.testing.sandbox import Sandbox, sandbox

__all__ = [
    "Box",
    "BoxRun",
    "FaultyStore",
    "Sandbox",
    "SyncBox",
    "VirtualLoop",
    "run_virtual",
    "sandbox",
]
