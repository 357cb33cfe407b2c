"""The configuration file that `tickwheel nats conf` proposes for production; a pure function."""

from __future__ import annotations

from textwrap import indent

from tickwheel.stores.nats.servers.conf import (
    BATCH,
    MAX_FILE,
    MAX_MEMORY,
    MAX_PAYLOAD,
    sync_interval,
)
from tickwheel.stores.nats.servers.permissions import ROLES, Role, subjects_of

CLIENT_PORT, ROUTE_PORT, MONITOR_PORT = 4222, 6222, 8222
# What the account may store on each server: less than the server's own limit, which must never be
# reached.
ACCOUNT_GB = 40
# With three copies of each job, one server may be lost.
COPIES = 3


def production_text(
    *,
    name: str,
    hosts: tuple[str, ...],
    durability: str = "strict",
    tls: str | None = "/etc/nats/tls",
    namespace: str = "default",
    shards: int = 1,
) -> str:
    """The configuration of the server `name`, one of `hosts`; `tls` is a folder or None."""
    parts = [
        _server(name, tls),
        _jetstream(durability),
        _accounts(namespace, shards, copies=min(len(hosts), COPIES)),
        *([_cluster(hosts, tls)] if len(hosts) > 1 else []),
    ]
    return "\n".join(parts)


def variables() -> list[str]:
    """The environment variables that hold the passwords."""
    return [_variable(user) for user in (*ROLES, "system")]


def _server(name: str, tls: str | None) -> str:
    return f"""\
# A NATS server for Tickwheel. Needs nats-server 2.15 or later.
#
# Passwords come from the environment of the server, so that this file holds no secret:
#   {", ".join(variables())}
# Start each with a letter: a value of digits only is read as a number. Better still are the bcrypt
# hashes of `nats server passwd`; write those into this file, in quotes.
#
# Check this file:  nats-server -t -c nats.conf

# Each server of a cluster has its own name, which must never change.
server_name: "{name}"
listen: "0.0.0.0:{CLIENT_PORT}"

# For health checks and metrics. It needs no password: keep it on this machine.
http: "127.0.0.1:{MONITOR_PORT}"

# A job's arguments and its result may be up to 1 MiB each.
max_payload: {MAX_PAYLOAD}

# On SIGUSR2 (an upgrade), clients are moved to other servers within this time.
lame_duck_duration: "30s"
lame_duck_grace_period: "5s"

{_tls(tls)}"""


def _tls(tls: str | None) -> str:
    if tls is None:
        return """\
# No TLS: passwords and jobs cross the network unencrypted. For private networks only.
"""
    return f"""\
# The certificate of this server, and of the CA that signs those of servers and clients.
tls {{
  cert_file: "{tls}/server.crt"
  key_file: "{tls}/server.key"
  ca_file: "{tls}/ca.crt"
  # With true, clients need a certificate as well.
  verify: false
}}
"""


def _jetstream(durability: str) -> str:
    return f"""\
jetstream {{
  store_dir: "/var/lib/nats"

  # When jobs are synced to disk.
  #   always  before they are acknowledged: a power failure loses nothing. Batches share one fsync,
  #           and so do replicated streams; single adds on one server cost one each, about 1 ms.
  #   "1s"    each second: a power failure of the only server, or of most servers of a cluster at
  #           the same time, loses up to a second of acknowledged jobs. A crash of the process loses
  #           nothing.
  # The server's default is 2 minutes: keep this line.
  sync_interval: {sync_interval(durability)}

  # Fixed sizes: the default is a share of what is free when the server starts, so it shrinks as
  # jobs fill the disk. Plan for 0.75 KB on disk and 0.7 KB of memory per waiting job.
  max_mem: {MAX_MEMORY}
  max_file: {MAX_FILE}

  # A step on many jobs is one batch. Allow for a few of them per node.
  limits {{ {BATCH} }}
}}
"""


def _accounts(namespace: str, shards: int, *, copies: int) -> str:
    users = "\n".join(_user(name, role, namespace, shards) for name, role in ROLES.items())
    return f"""\
accounts {{
  TICKWHEEL {{
    # At 90 % of this, adds are refused; jobs that are there still run. Copies count: the limit is
    # {ACCOUNT_GB} GB times {copies} (replicas). Per copy it must be less than max_file of a server.
    jetstream: {{ max_file: {ACCOUNT_GB * copies}GB }}
    # Roles limit the damage of mistakes and leaked passwords. They don't stop a hostile producer: a
    # scheduled message may target any subject of the stream, whatever its sender may publish to.
    # Teams that don't trust each other need separate accounts.
    users: [
{indent(users, " " * 6)}
    ]
  }}
  # For `nats server` commands, which see all accounts.
  SYSTEM {{ users: [{{ user: "system", password: ${_variable("system")} }}] }}
}}
system_account: SYSTEM
"""


def _user(name: str, role: Role, namespace: str, shards: int) -> str:
    def subjects(templates: tuple[str, ...]) -> str:
        lines = (f'"{each}"' for each in subjects_of(templates, name, namespace, shards))
        return indent("\n".join(lines), " " * 6)

    return f"""\
# {role.about}
{{
  user: "{name}"
  password: ${_variable(name)}
  permissions: {{
    publish: [
{subjects(role.publish)}
    ]
    subscribe: [
{subjects(role.subscribe)}
    ]
  }}
}}"""


def _variable(user: str) -> str:
    return f"NATS_{user.upper()}_PASSWORD"


def _cluster(hosts: tuple[str, ...], tls: str | None) -> str:
    routes = "\n".join(f'    "nats-route://{host}:{ROUTE_PORT}"' for host in hosts)
    guard = (
        "  # Everyone who reaches this port can join: only the other servers should reach it."
        if tls is None
        else f"""\
  # Only servers with a certificate of this CA may join.
  tls {{
    cert_file: "{tls}/server.crt"
    key_file: "{tls}/server.key"
    ca_file: "{tls}/ca.crt"
    verify: true
  }}"""
    )
    return f"""\
# {len(hosts)} servers, on machines that don't fail together. A majority must be up.
cluster {{
  name: "tickwheel"
  listen: "0.0.0.0:{ROUTE_PORT}"
  routes: [
{routes}
  ]
{guard}
}}
"""
