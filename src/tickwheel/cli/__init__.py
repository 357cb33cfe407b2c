"""The command line: `tickwheel worker`, `jobs`, `dead`, `queues` and more; root.py lists them all.

stdout carries data, stderr everything else. Exit codes: 0 success, 1 failure, 2 usage, 3 not found,
4 conflict, 5 store unavailable, 130 interrupted.
"""

from tickwheel.cli.root import main

__all__ = ["main"]
