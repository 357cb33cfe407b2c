"""Runs a NATS server that ends with the process that started it.

A program of its own, `watcher.py LOCK COMMAND...`: it starts the command, waits for it and ends
with its exit code. Its standard input is a pipe from the process that wants the server. When that
process ends, for whatever reason, the pipe closes; the watcher then stops the server, and kills it
if it does not end in time.

LOCK is an open file that locks the server's folder. Only the server keeps it open, so the folder is
locked for exactly as long as the server runs.

This program imports nothing of Tickwheel and runs without site-packages: it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

# How long a server may take to write what it has in memory; then it is killed.
STOP_S = 10.0
PR_SET_PDEATHSIG = 1


def main(lock: int, command: list[str]) -> int:
    watcher = os.getpid()
    server = os.fork()
    if not server:
        _become(command, watcher)
    os.close(lock)
    # Ctrl-C and service managers signal every process they find; here only the pipe counts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_when_alone, args=(server,), daemon=True).start()
    _, status = os.waitpid(server, 0)
    return abs(os.waitstatus_to_exitcode(status))


def _become(command: list[str], watcher: int) -> NoReturn:
    """In the child: become the server."""
    try:
        if sys.platform == "linux":
            _die_with_parent()
        if os.getppid() != watcher:
            os._exit(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _die_with_parent() -> None:
    """If even this watcher is killed, the kernel stops the server. Only Linux can do that."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_when_alone(server: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGTERM)
        # A frozen server handles no other signal.
        os.kill(server, signal.SIGCONT)
        threading.Event().wait(STOP_S)
        os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
