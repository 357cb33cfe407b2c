"""Around each run: close database connections that are broken or too old, as around a request.

Child processes import this before anything else of the project, so it sets Django up where that has
not happened yet.
"""

from __future__ import annotations

import django
from asgiref.sync import sync_to_async
from django.apps import apps
from django.db import close_old_connections


class Connections:
    """What Django does at the beginning and at the end of a request."""

    def __enter__(self) -> None:
        if not apps.ready:
            django.setup()
        close_old_connections()

    def __exit__(self, *_: object) -> None:
        close_old_connections()

    # The async ORM works in a thread of its own: its connections are there.

    async def __aenter__(self) -> None:
        await sync_to_async(close_old_connections)()

    async def __aexit__(self, *_: object) -> None:
        await sync_to_async(close_old_connections)()
