"""Tools for testing programs that use Tickwheel, and Tickwheel itself.

`sandbox(app)` gives an app a store in memory and its own clock for the duration of a test: see
docs/testing.md. Also here: an event loop with virtual time, which can run the engine itself, and a
store with an unreliable connection.
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
