"""The command line: `tickwheel worker`, `jobs`, `dead`, `queues`.

stdout carries data, stderr everything else. Exit codes: 0 fine, 1 failure, 2 usage, 3 not found,
4 conflict, 5 store unavailable, 130 interrupted.
"""

from tickwheel.cli.root import main

__all__ = ["main"]
