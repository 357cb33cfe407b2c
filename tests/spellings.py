"""Every way to write a password or a token into the URL of a store, right or wrong."""

from __future__ import annotations

SECRET = "hunter2"
# Nothing listens there.
NOWHERE = "127.0.0.1:9"

_PASSWORDS = (
    SECRET,
    *(f"{SECRET}{mark}rest" for mark in "#/?@:&=%;, "),
    *(f"12{mark}{SECRET}" for mark in "#/?@:&=%;,"),
    f"{SECRET}%2Frest",
    f"[{SECRET}]",
    f"{SECRET}[",
    f"{SECRET}\u2100",
    f"{SECRET}%ff",
    f"12/{SECRET}?{SECRET}#{SECRET}@{SECRET}",
)
_SCHEMES = ("nats", "redis", "rediss", "valkey", "postgresql", "postgres")
_FILES = ("sqlite", "memory", "nats+embedded")
_OPTIONS = ("password", "PASSWORD", "pass%77ord", "passwd", "token", "auth", "sslpassword")

SPELLINGS = (
    *(
        f"{scheme}://ann:{password}@{NOWHERE}"
        for scheme in (*_SCHEMES, *_FILES)
        for password in _PASSWORDS
    ),
    *(f"{scheme}://:{SECRET}@{NOWHERE}" for scheme in _SCHEMES),
    *(f"{scheme}://{SECRET}@{NOWHERE}" for scheme in ("nats", "redis")),
    *(f"nats://{SECRET}{mark}x@{NOWHERE}" for mark in "#/?@"),
    f"nats://{SECRET}:@{NOWHERE}",
    f"nats://ann:{SECRET}@{NOWHERE},ann:{SECRET}@{NOWHERE}",
    f"postgresql://ann:{SECRET}@{NOWHERE},ann:{SECRET}@{NOWHERE}/shop",
    f"nats://{NOWHERE}?monitor=http://ann:{SECRET}@{NOWHERE}",
    *(
        f"{scheme}://{NOWHERE}/{path}?{option}={SECRET}"
        for scheme in _SCHEMES
        for path in ("", "0")
        for option in _OPTIONS
    ),
    *(f"sqlite:///jobs.db?{option}={SECRET}" for option in (*_OPTIONS, "key")),
    f"redis://{NOWHERE}:{SECRET}",
    f"ann:{SECRET}@{NOWHERE}",
    f"redis:ann:{SECRET}@{NOWHERE}",
    f"redis:/:{SECRET}@{NOWHERE}",
    f"//ann:{SECRET}@{NOWHERE}",
    f"://ann:{SECRET}@{NOWHERE}",
    f"{SECRET}@nats://{NOWHERE}",
    f"mongo://ann:{SECRET}@{NOWHERE}",
    f"host={NOWHERE} user=ann password={SECRET}",
    f"host={NOWHERE} password='{SECRET} x'",
)
