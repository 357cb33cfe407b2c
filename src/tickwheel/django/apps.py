"""The entry in INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig


class TickwheelConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """Has no models: the store makes its own tables."""

    name = "tickwheel.django"
    label = "tickwheel"
    verbose_name = "Tickwheel"
