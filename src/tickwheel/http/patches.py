"""What has changed between two JSON documents, and the text that says so. Pure.

A patch is one of

    {"set": value}                                     the value in place of the old one
    {"keys": {name: patch}, "drop": [name]}            of an object: what differs
    {"by": "id", "order": [key, …], "items": {key: patch}}
                                                       of a list of objects that a text field tells
                                                       apart: their order, and those that differ
"""

from __future__ import annotations

from typing import Any

Patch = dict[str, Any]

# The fields that may tell the objects of a list apart, the best first.
NAMES = ("id", "name", "task", "fingerprint", "method", "key")
# In JavaScript, this is no name of an object like others.
UNSAFE = "__proto__"


def difference(old: Any, new: Any) -> Patch | None:
    """What makes `new` of `old`; None if they are the same."""
    if isinstance(old, dict) and isinstance(new, dict):
        return _of_objects(old, new)
    if isinstance(old, list) and isinstance(new, list):
        return _of_lists(old, new)
    # 1, 1.0 and true are equal in Python, and 0.0 and -0.0; they are not the same text.
    return None if type(old) is type(new) and repr(old) == repr(new) else {"set": new}


def _of_objects(old: dict[str, Any], new: dict[str, Any]) -> Patch | None:
    if UNSAFE in old or UNSAFE in new:
        return None if _same(old, new) else {"set": new}
    keys = {name: {"set": value} for name, value in new.items() if name not in old}
    for name in old.keys() & new.keys():
        if (patch := difference(old[name], new[name])) is not None:
            keys[name] = patch
    drop = [name for name in old if name not in new]
    if not keys and not drop:
        return None
    return {"keys": keys, "drop": drop} if drop else {"keys": keys}


def _same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return old.keys() == new.keys() and all(difference(old[k], new[k]) is None for k in old)


def _of_lists(old: list[Any], new: list[Any]) -> Patch | None:
    by = _told_apart_by(old, new)
    if by is None:
        same = len(old) == len(new) and all(
            difference(before, after) is None for before, after in zip(old, new, strict=True)
        )
        return None if same else {"set": new}
    known = {each[by]: each for each in old}
    items = {}
    for each in new:
        patch = difference(known[each[by]], each) if each[by] in known else {"set": each}
        if patch is not None:
            items[each[by]] = patch
    order = [each[by] for each in new]
    if not items and order == list(known):
        return None
    return {"by": by, "order": order, "items": items}


def _told_apart_by(old: list[Any], new: list[Any]) -> str | None:
    """The field whose text is another one in each object, of both lists."""
    if not old or not new or not all(isinstance(each, dict) for each in (*old, *new)):
        return None
    return next((name for name in NAMES if _unique(old, name) and _unique(new, name)), None)


def _unique(objects: list[dict[str, Any]], name: str) -> bool:
    texts = [each.get(name) for each in objects]
    return all(isinstance(text, str) and text != UNSAFE for text in texts) and len({*texts}) == len(
        texts
    )
