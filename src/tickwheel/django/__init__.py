"""Tickwheel in a Django project: `"tickwheel.django"` in INSTALLED_APPS, and `app` for its tasks.

# shop/tasks.py
from tickwheel.django import app

@app.task
def send_receipt(order_id: int) -> None: ...
"""

from __future__ import annotations

from typing import Any

from tickwheel.django.project import DjangoApp

__all__ = ["DjangoApp", "app"]

# The project's app, made from its settings when it is first used.
app: DjangoApp


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = made = DjangoApp()
    return made
