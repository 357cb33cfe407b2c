"""The redis-py driver: imports, and connections to one server."""

from __future__ import annotations

from typing import Any

from tickwheel.errors import BadConfig
from tickwheel.stores.redis.url import RedisOptions

try:
    import redis.asyncio as driver
    from redis import exceptions as errors
    from redis.asyncio.connection import Connection, SSLConnection
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.crc import key_slot
except ImportError as error:
    if error.name is None or error.name.partition(".")[0] != "redis":
        raise
    raise BadConfig("redis:// needs its driver: pip install 'tickwheel[redis]'") from None

# All imports from the driver are here, so that one place says how to install it.
__all__ = ["Address", "Connection", "client_of", "connection_to", "errors", "key_slot"]

Address = tuple[str, int]

# How many connections to a server one handle opens; when all are in use, further calls wait.
CONNECTIONS = 16
CONNECT_S = 5.0
# A connection that was idle for longer is checked with a PING before it is used.
IDLE_S = 15.0


def client_of(options: RedisOptions, address: Address) -> Any:
    """A pool of connections to one server, none of them open yet."""
    host, port = address
    pool = driver.BlockingConnectionPool(
        connection_class=_kind(options),
        max_connections=CONNECTIONS,
        timeout=options.timeout_s,
        host=host,
        port=port,
        health_check_interval=IDLE_S,
        **_settings(options),
    )
    return driver.Redis.from_pool(pool)


def connection_to(options: RedisOptions, address: Address) -> Connection:
    host, port = address
    return _kind(options)(host=host, port=port, **_settings(options))


class _Unnamed:
    """A connection that doesn't send CLIENT SETINFO. Older servers answer it with an error, which
    the driver expects; but it was seen to arrive as the answer of a call."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        vars(self).update(driver_info=None, lib_name=None, lib_version=None)


class _Plain(_Unnamed, Connection):
    pass


class _Tls(_Unnamed, SSLConnection):
    pass


def _kind(options: RedisOptions) -> type[Connection]:
    return _Tls if options.tls else _Plain


def _settings(options: RedisOptions) -> dict[str, Any]:
    return {
        "db": options.db,
        "username": options.user,
        "password": options.password,
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": min(CONNECT_S, options.timeout_s),
        "socket_keepalive": True,
        "protocol": 2,
        # The caller retries: only it knows how to read the answer to a repeated call.
        "retry": Retry(NoBackoff(), 0),
        **_tls(options),
    }


def _tls(options: RedisOptions) -> dict[str, Any]:
    if not options.tls:
        return {}
    names = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
    return {names[name]: str(path) for name, path in options.files.items()} | {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
    }
