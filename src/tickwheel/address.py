"""The address of an HTTP server, as people write it: ":9100", "0.0.0.0:9100", "[::1]:9100"."""

from __future__ import annotations

import re

from tickwheel.errors import BadConfig, shown

LOOPBACK = "127.0.0.1"
LAST_PORT = 65_535

_ADDRESS = re.compile(r"(?:(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]*):)?(\d{1,5})", re.ASCII)


def http_address(text: str, *, processes: int = 1) -> tuple[str, int]:
    """The host, without brackets, and the port; without a host, the loopback. Port 0 stands for any
    that is free. Raises BadConfig, also if there are not enough ports for this many processes."""
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise BadConfig(
            f"http={shown(text)}: write HOST:PORT, or :9100 for this machine only, or [::1]:9100"
        )
    port = int(found[2])
    if port > LAST_PORT:
        raise BadConfig(f"http={shown(text)}: a port is at most {LAST_PORT}")
    if port and port + processes - 1 > LAST_PORT:
        raise BadConfig(
            f"http={shown(text)}: {processes} processes need as many ports, from {port} on, and "
            f"{LAST_PORT} is the last"
        )
    return (found[1] or "").strip("[]") or LOOPBACK, port


def nth_address(text: str, number: int) -> str:
    """The address of the n-th process, from 1 on: each has a port of its own."""
    host, port = http_address(text)
    port = port + number - 1 if port else 0
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
