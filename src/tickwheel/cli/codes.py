"""Exit codes: scripts rely on them, so they never change their meaning."""

OK = 0
FAILURE = 1
USAGE = 2
NOT_FOUND = 3
CONFLICT = 4
STORE = 5
INTERRUPTED = 130
