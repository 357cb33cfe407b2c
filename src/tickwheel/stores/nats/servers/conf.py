"""The configuration file of a NATS server that Tickwheel starts; a pure function."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tickwheel.errors import BadConfig

HOST = "127.0.0.1"
USER = "tickwheel"
# The server chooses a free port and writes it down.
ANY_PORT = -1
# How often jobs are synced to disk. A power failure loses nothing, or up to a second.
SYNC = {"strict": "always", "fast": "1s"}

# A job's message holds its arguments and its result, up to 1 MiB each, and its history.
MAX_PAYLOAD = "4MB"
# Streams are on disk; this is for everything else that is kept in memory.
MAX_MEMORY = "64MB"
# Fixed, because the server's default is a share of the space that is free when it starts: with a
# disk half full of jobs it would refuse more jobs after a restart.
MAX_FILE = "50GB"
# One batch is one step on up to 1,000 jobs, the most that the server accepts. Each node may have a
# few in flight, so allow for hundreds of nodes; the server's default is 50 per stream.
BATCH = "batch { max_msgs: 1000, max_inflight_per_stream: 1000, max_inflight_total: 4000 }"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """How the servers of one cluster on this machine find each other."""

    name: str
    port: int
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What one server is started with. Without a password, everyone on this machine can connect."""

    folder: Path
    name: str = "tickwheel"
    port: int = ANY_PORT
    durability: str = "strict"
    password: str | None = None
    routes: Routes | None = None
    max_file: str = MAX_FILE


def config_text(settings: ServerSettings) -> str:
    """The server's configuration file. Raises BadConfig."""
    parts = [_server(settings), _jetstream(settings)]
    if settings.password is not None:
        parts.append(f"authorization {{ {_login(settings.password)} }}\n")
    if settings.routes is not None:
        parts.append(_cluster(settings.routes, settings.password))
    return "\n".join(parts)


def sync_interval(durability: str) -> str:
    if durability not in SYNC:
        raise BadConfig(f"durability {durability!r} is unknown; use {' or '.join(SYNC)}")
    return SYNC[durability]


def _server(settings: ServerSettings) -> str:
    folder = settings.folder
    return f"""\
server_name: {_quoted(settings.name)}
host: {HOST}
port: {settings.port}
http: "{HOST}:{ANY_PORT}"
ports_file_dir: {_quoted(folder)}
pid_file: {_quoted(folder / "pid")}
log_file: {_quoted(folder / "nats.log")}
logfile_size_limit: 10MB
logfile_max_num: 3
max_payload: {MAX_PAYLOAD}
lame_duck_grace_period: "1s"
"""


def _jetstream(settings: ServerSettings) -> str:
    return f"""\
jetstream {{
  store_dir: {_quoted(settings.folder)}
  sync_interval: {sync_interval(settings.durability)}
  max_mem: {MAX_MEMORY}
  max_file: {settings.max_file}
  limits {{ {BATCH} }}
}}
"""


def _cluster(routes: Routes, password: str | None) -> str:
    login = "" if password is None else f"{USER}:{password}@"
    peers = ", ".join(f'"nats-route://{login}{HOST}:{port}"' for port in routes.peers)
    guard = "" if password is None else f"\n  authorization {{ {_login(password)} }}"
    # Not advertised: the URL given to clients has all addresses, with the password.
    return f"""\
cluster {{
  name: {_quoted(routes.name)}
  listen: "{HOST}:{routes.port}"
  no_advertise: true
  routes: [{peers}]{guard}
}}
"""


def _login(password: str) -> str:
    return f"user: {_quoted(USER)}, password: {_quoted(password)}"


def _quoted(value: str | Path) -> str:
    return json.dumps(str(value), ensure_ascii=False)
