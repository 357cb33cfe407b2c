"""Changes of documents, applied as the dashboard does."""

from __future__ import annotations

from typing import Any


def patched(old: Any, patch: dict[str, Any]) -> Any:
    """As the page applies it: `patched` in live.js."""
    if "set" in patch:
        return patch["set"]
    if "order" in patch:
        known = {item[patch["by"]]: item for item in old}
        items = patch["items"]
        return [
            patched(known.get(key), items[key]) if key in items else known[key]
            for key in patch["order"]
        ]
    copy = dict(old)
    for name, inner in patch.get("keys", {}).items():
        copy[name] = patched(copy.get(name), inner)
    for name in patch.get("drop", []):
        del copy[name]
    return copy
