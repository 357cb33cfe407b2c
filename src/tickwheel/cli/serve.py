"""`tickwheel serve`: the HTTP API and the dashboard of an app, or of a store alone."""

from __future__ import annotations

from typing import Any

import click

from tickwheel.cli.options import Verb, filled
from tickwheel.cli.work import run_options
from tickwheel.config import load
from tickwheel.errors import BadConfig


@click.command("serve", cls=Verb)
@run_options()
@click.option(
    "--store",
    metavar="URL",
    callback=filled,
    help="Serve this store, without an app: callbacks, and jobs of any task.",
)
@click.option(
    "--host", metavar="ADDRESS", default="127.0.0.1", callback=filled, help="Where to listen."
)
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=8484, help="Which port; 0: any."
)
@click.option(
    "--worker",
    is_flag=True,
    help="Run jobs as well, in the same process: the app's, or without one callbacks.",
)
@click.option(
    "--root-path", metavar="PATH", default="", help="The path under which a proxy serves it."
)
@click.option("--tls-cert", metavar="FILE", callback=filled, help="A certificate, for HTTPS.")
@click.option("--tls-key", metavar="FILE", callback=filled, help="Its private key.")
@click.option(
    "--forwarded-allow-ips",
    metavar="A,B",
    callback=filled,
    help="Proxies to trust about the client's address.",
)
@click.option(
    "--allow-host",
    "allow_hosts",
    metavar="HOST",
    multiple=True,
    help="Without API keys, also answer requests to this host. Can be repeated.",
)
@click.option(
    "--no-dashboard", is_flag=True, help="Serve the HTTP API alone, without pages for people."
)
@click.option("--parent", type=int, hidden=True)
def serve(
    store: str | None,
    host: str,
    port: int,
    worker: bool,
    root_path: str,
    tls_cert: str | None,
    tls_key: str | None,
    forwarded_allow_ips: str | None,
    allow_hosts: tuple[str, ...],
    no_dashboard: bool,
    parent: int | None,
    **flags: Any,
) -> int:
    """Serve the HTTP API and the dashboard.

    The API is for programs in any language, the dashboard for people. The first SIGTERM or Ctrl-C
    lets running requests, and jobs, finish; the second ends the process at once. GET
    /v1/openapi.json describes the API. Needs the extra `http`.
    """
    if store is not None and flags["app"] is not None:
        raise BadConfig("name an app or use --store, not both")
    config = load(flags)
    # A named app uses its own store, unless a store is named as well.
    target = None if store is not None else config.settings.app or None
    if flags["app"] is None and config.chosen("store"):
        target = None
    from tickwheel.cli import run_server
    from tickwheel.http.server import Listening

    root_path = f"/{root_path.strip('/')}" if root_path.strip("/") else ""
    listening = Listening(
        host=host,
        port=port,
        # Whoever restarts it when the code changes wants the usual port, if it is free.
        or_any=parent is not None,
        root_path=root_path,
        tls_cert=tls_cert,
        tls_key=tls_key,
        forwarded_allow_ips=forwarded_allow_ips,
    )
    return run_server.serve(
        run_server.Serving(
            target=target,
            store=store,
            settings=config.settings,
            listening=listening,
            worker=worker,
            allow_hosts=allow_hosts,
            dashboard=not no_dashboard,
        ),
        parent,
    )
