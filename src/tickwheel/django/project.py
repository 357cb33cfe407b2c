"""The app of a Django project: its settings, its tasks, its transactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import django
from django.apps import apps
from django.conf import settings
from django.utils.module_loading import autodiscover_modules

from tickwheel.app import App
from tickwheel.config import NAMES
from tickwheel.django.connections import Connections
from tickwheel.django.databases import Transactions, alias_of, url_of
from tickwheel.errors import BadConfig, did_you_mean

# What `TICKWHEEL` may have for the app, and for its workers.
FOR_APP = (
    *("name", "store", "outbox", "imports", "retention", "dead_retention", "payload_limit"),
    *("objective", "signing_keys", "encryption_keys", "signing"),
)
FOR_WORKERS = tuple(name for name in NAMES if name not in (*FOR_APP, "app"))


class DjangoApp(App):
    """An app whose settings are the project's, `TICKWHEEL = {"store": …}`, and whose tasks are in
    the `tasks` modules of the installed apps.

    Inside `transaction.atomic` a job joins the transaction if its store or its outbox is in that
    database; otherwise it is enqueued when the transaction is committed. This holds for
    `enqueue_sync` and `app.sync.enqueue_many`.
    """

    around = Connections

    def __init__(self, **options: Any) -> None:
        """Options are those of `App`, and override the project's."""
        given = {**_for_app(), **options}
        for what in ("store", "outbox"):
            if isinstance(given.get(what), str):
                given[what] = url_of(what, given[what])
        super().__init__(given.pop("store", None), name=given.pop("name", None) or _name(), **given)
        within = given.get("outbox") or self.url
        alias = alias_of(within) if "://" in within else None
        if alias is not None and "outbox" not in given and self.url.startswith("sqlite:"):
            raise BadConfig(
                f"the store is in the file of Django's database {alias!r}, but two SQLite "
                "libraries in one process can't share a file: give the store a file of its own, "
                f"and TICKWHEEL['outbox'] = {alias!r} if jobs are to join its transactions"
            )
        self._access.ambient = Transactions(alias)

    def import_tasks(self) -> None:
        if not apps.ready:
            django.setup()
        super().import_tasks()
        autodiscover_modules("tasks")


def for_workers() -> dict[str, Any]:
    """What `TICKWHEEL` says about workers."""
    return {name: value for name, value in _given().items() if name in FOR_WORKERS}


def _for_app() -> dict[str, Any]:
    return {name: value for name, value in _given().items() if name in FOR_APP}


def _given() -> dict[str, Any]:
    given = getattr(settings, "TICKWHEEL", {})
    if not isinstance(given, Mapping):
        raise BadConfig(f"TICKWHEEL must be a dict of settings, not {type(given).__name__}")
    known = (*FOR_APP, *FOR_WORKERS)
    for name in given:
        if name not in known:
            raise BadConfig(f"TICKWHEEL has no setting {name!r}{did_you_mean(str(name), known)}")
    return dict(given)


def _name() -> str:
    """The project's: the package of its settings."""
    return str(getattr(settings, "SETTINGS_MODULE", None) or "django").partition(".")[0]
