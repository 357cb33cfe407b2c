"""Runs a NATS server that must not outlive the process that wanted it.

A program of its own, `watcher.py LOCK COMMAND...`: it starts the command, waits for it and
ends with its exit code. Its standard input is a pipe that only the wanting process can write to.
When that is gone, however it went, the pipe ends; the server is then told to stop, and killed if
it does not.

LOCK is an open file that locks the server's folder. It is left to the server alone, so the folder
is locked for exactly as long as the server lives.

This imports nothing of Tickwheel and starts without site-packages: it is there in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

# How long a server may take to write what it has in memory, before it is killed.
STOP_S = 10.0
PR_SET_PDEATHSIG = 1


def main(lock: int, command: list[str]) -> int:
    watcher = os.getpid()
    server = os.fork()
    if not server:
        _become(command, watcher)
    os.close(lock)
    # Ctrl-C and service managers signal every process they find; for us only the pipe counts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_when_alone, args=(server,), daemon=True).start()
    _, status = os.waitpid(server, 0)
    return abs(os.waitstatus_to_exitcode(status))


def _become(command: list[str], watcher: int) -> NoReturn:
    """In the child: turn into the server."""
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
    """Should even this watcher be killed, the kernel stops the server. Linux alone has that."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_when_alone(server: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGTERM)
        # A server that was frozen takes no other signal.
        os.kill(server, signal.SIGCONT)
        threading.Event().wait(STOP_S)
        os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
