"""The configuration that we propose for NATS servers in production, as pure text."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import indent

from tickwheel.stores.nats.conf import BATCH, MAX_FILE, MAX_MEMORY, MAX_PAYLOAD, sync_interval
from tickwheel.stores.nats.steps import Layout

CLIENT_PORT, ROUTE_PORT, MONITOR_PORT = 4222, 6222, 8222


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A kind of user: what it is for, what it may send, and to whom it may listen."""

    about: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


# Opening the store: what the stream is like, and a proof that the server can do what we need.
_OPEN = ("$JS.API.INFO", "$JS.API.STREAM.INFO.{stream}", "{prefix}.p.*.*.*")
# Looking at jobs: single ones, pages of them, and their number.
_LOOK = (
    "$JS.API.STREAM.MSG.GET.{stream}",
    "$JS.API.DIRECT.GET.{stream}",
    "$JS.API.CONSUMER.INFO.{stream}.*",
    "$JS.API.CONSUMER.LIST.{stream}",
)
# Adding: jobs that wait, jobs that are ready, and the consumers of a queue that is new.
_ADD = ("{prefix}.t.s.*.*", "{prefix}.r.*.*.*", "$JS.API.CONSUMER.CREATE.{stream}.*")
# Cancelling: jobs that are cancelled, jobs that are asked to stop, and a word to their workers.
_CANCEL = (
    "{prefix}.t.c.*.*",
    "{prefix}.t.j.*.*",
    "{prefix}.t.k.*.*",
    "tw-news.{namespace}.asked.*",
)
# Working: jobs in every state, schedules, workers, buckets, tokens to take and to spend, and old
# jobs to forget.
_WORK = (
    "$JS.API.STREAM.PURGE.{stream}",
    "{prefix}.t.*.*.*",
    "{prefix}.k.*",
    "{prefix}.w.*",
    "{prefix}.b.*",
    "$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
    "$JS.ACK.{stream}.>",
    "$JS.ACK.*.*.{stream}.>",
)
# Answers come to an inbox of the user's own: nobody hears those of others.
_HEAR = ("_INBOX_{user}.>", "tw-news.{namespace}.>")

# Who may do what. `stream` stands for each stream of the namespace, `prefix` for what the subjects
# in them begin with; `steps` has the subjects.
ROLES = {
    "producer": Role(
        about="adds jobs, cancels them, looks at them",
        publish=(*_OPEN, *_LOOK, *_ADD, *_CANCEL),
        subscribe=_HEAR,
    ),
    "worker": Role(
        about="the same, and runs jobs and fires schedules",
        publish=(*_OPEN, *_LOOK, *_ADD, *_CANCEL, *_WORK),
        subscribe=_HEAR,
    ),
    "operator": Role(
        about="creates and changes streams, pauses queues, prunes: open the store with it once",
        publish=("tw.{namespace}.>", "tw-news.{namespace}.>", "$JS.API.>", "$JS.ACK.>"),
        subscribe=_HEAR,
    ),
}


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
        _accounts(namespace, shards),
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
# Letters first: a value of digits alone is read as a number. `nats server passwd` makes bcrypt
# hashes, which are better still; write those into this file, in quotes.
#
# Check this file:  nats-server -t -c nats.conf

# Each server of a cluster has a name of its own, which it keeps for life.
server_name: "{name}"
listen: "0.0.0.0:{CLIENT_PORT}"

# For health checks and metrics. It asks for no password: keep it on this machine.
http: "127.0.0.1:{MONITOR_PORT}"

# A job's arguments and its result may have 1 MiB each.
max_payload: {MAX_PAYLOAD}

# On SIGUSR2 (an upgrade) clients are moved to other servers within this time.
lame_duck_duration: "30s"
lame_duck_grace_period: "5s"

{_tls(tls)}"""


def _tls(tls: str | None) -> str:
    if tls is None:
        return """\
# No TLS: passwords and jobs cross the network in the clear. For private networks alone.
"""
    return f"""\
# Certificates of this server, and of the authority that signed those of servers and clients.
tls {{
  cert_file: "{tls}/server.crt"
  key_file: "{tls}/server.key"
  ca_file: "{tls}/ca.crt"
  # true asks clients for a certificate as well.
  verify: false
}}
"""


def _jetstream(durability: str) -> str:
    return f"""\
jetstream {{
  store_dir: "/var/lib/nats"

  # When what was acknowledged is forced onto the disk.
  #   always  before it is acknowledged. A power cut loses nothing. Batches share one fsync, and
  #           so do replicated streams; single adds on one server cost one each, about 1 ms.
  #   "1s"    each second: a power cut of the only server, or of most servers of a cluster at the
  #           same time, loses up to a second of acknowledged jobs. A crash of the process does not.
  # The server's own default is 2 minutes: don't leave this line out.
  sync_interval: {sync_interval(durability)}

  # Fixed sizes: the default is a share of what is free when the server starts, and so shrinks as
  # jobs fill the disk. Plan for 0.5 KB on disk and 0.7 KB of memory per waiting job.
  max_mem: {MAX_MEMORY}
  max_file: {MAX_FILE}

  # A step on many jobs is one batch. Allow for a few of them per node.
  limits {{ {BATCH} }}
}}
"""


def _accounts(namespace: str, shards: int) -> str:
    users = "\n".join(_user(name, role, namespace, shards) for name, role in ROLES.items())
    return f"""\
accounts {{
  TICKWHEEL {{
    jetstream: enabled
    # Roles keep slips and leaked passwords within bounds. They are no wall against a hostile
    # producer: a scheduled message may aim at any subject of the stream, whatever its sender may
    # publish to. Teams that don't trust one another need an account each.
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


def subjects_of(templates: tuple[str, ...], user: str, namespace: str, shards: int) -> list[str]:
    """The subjects that these stand for, each once."""
    layouts = [Layout(namespace, shard, 0) for shard in range(shards)]
    found = [
        each.format(user=user, stream=layout.stream, prefix=layout.prefix, namespace=namespace)
        for each in templates
        for layout in layouts
    ]
    return list(dict.fromkeys(found))


def _variable(user: str) -> str:
    return f"NATS_{user.upper()}_PASSWORD"


def _cluster(hosts: tuple[str, ...], tls: str | None) -> str:
    routes = "\n".join(f'    "nats-route://{host}:{ROUTE_PORT}"' for host in hosts)
    guard = (
        "  # Anybody who reaches this port can join: close it to all but the other servers."
        if tls is None
        else f"""\
  # Only servers with a certificate of our authority may join.
  tls {{
    cert_file: "{tls}/server.crt"
    key_file: "{tls}/server.key"
    ca_file: "{tls}/ca.crt"
    verify: true
  }}"""
    )
    return f"""\
# {len(hosts)} servers, on machines that don't fail together. Most of them must be up.
cluster {{
  name: "tickwheel"
  listen: "0.0.0.0:{ROUTE_PORT}"
  routes: [
{routes}
  ]
{guard}
}}
"""
