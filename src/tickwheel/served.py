"""An app as ASGI apps: its HTTP API and its dashboard."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from tickwheel.checks import checked_options

Asgi = Callable[..., Awaitable[None]]


class Served:
    """The part of an app that web servers serve. Needs the extra `http`."""

    @checked_options
    def http(self, *, allow_hosts: Sequence[str] = (), redact: Sequence[str] | None = None) -> Asgi:
        """The HTTP API as an ASGI app, for your own server, alone or mounted; `tickwheel serve`
        runs it for you. Needs the extra `http`.

        While the store has no API keys, only requests of this machine, or to one of `allow_hosts`,
        are answered. Values whose names match `redact` (default: the setting) are hidden.
        """
        # By name: it is a face, above the API, and its libraries may not be installed.
        face = importlib.import_module("tickwheel.http.asgi")
        return cast(Asgi, face.asgi_app(self, allow_hosts=allow_hosts, redact=redact))

    @checked_options
    def dashboard(
        self, *, allow_hosts: Sequence[str] = (), redact: Sequence[str] | None = None
    ) -> Asgi:
        """The dashboard, with the HTTP API, as an ASGI app: for your own server, alone or mounted
        below any path; `tickwheel serve` and `tickwheel dev` run it for you. See `http`."""
        face = importlib.import_module("tickwheel.dashboard.pages")
        return cast(Asgi, face.dashboard_app(self, allow_hosts=allow_hosts, redact=redact))
