"""What has changed between two documents: applied to the old one, it gives the new one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from patching import patched
from tickwheel.http import patches
from tickwheel.http.patches import difference

LIVE = Path(patches.__file__).parents[1] / "dashboard" / "static" / "js" / "live.js"


def exactly(value: Any) -> str:
    """Two values that differ in any way have other texts."""
    return json.dumps(value, sort_keys=True)


# Few values, so that two documents have much in common.
names = st.sampled_from(["id", "name", "a", "b", "__proto__", "toString", ""])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2**53 + 1, -(2**70), 0.0, -0.0, 1.0, 1.5]),
    st.sampled_from(["", "x", "y", "é", "__proto__", "constructor"]),
)
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(names, inner, max_size=4),
        st.lists(
            st.builds(
                lambda key, more: {**more, "id": key},
                st.sampled_from(["x", "y", "z", "constructor"]),
                st.dictionaries(names, inner, max_size=3),
            ),
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@given(documents, documents)
@settings(max_examples=500)
def test_what_differs_makes_the_new_document_of_the_old(old: Any, new: Any) -> None:
    patch = difference(old, new)
    if patch is None:
        assert exactly(old) == exactly(new)
    else:
        assert exactly(old) != exactly(new)
        sent = msgspec.json.decode(msgspec.json.encode(patch))
        assert exactly(patched(old, sent)) == exactly(new)


@given(documents)
def test_nothing_differs_from_itself(document: Any) -> None:
    assert difference(document, msgspec.json.decode(msgspec.json.encode(document))) is None


def test_only_what_differs_is_said() -> None:
    old = {"jobs": [{"id": "a", "n": 1}, {"id": "b", "n": 1}], "cursor": None, "old": 1}
    new = {"jobs": [{"id": "c", "n": 1}, {"id": "a", "n": 2}], "cursor": "x"}
    assert difference(old, new) == {
        "keys": {
            "cursor": {"set": "x"},
            "jobs": {
                "by": "id",
                "order": ["c", "a"],
                "items": {"c": {"set": {"id": "c", "n": 1}}, "a": {"keys": {"n": {"set": 2}}}},
            },
        },
        "drop": ["old"],
    }


def test_a_list_that_was_only_sorted_names_no_item() -> None:
    old = [{"name": "a"}, {"name": "b"}]
    assert difference(old, old[::-1]) == {"by": "name", "order": ["b", "a"], "items": {}}


@pytest.mark.parametrize(
    "old, new",
    [
        ([{"id": "a"}, {"id": "a"}], [{"id": "a"}]),
        ([{"id": 1}], [{"id": 2}]),
        ([{"n": "a"}], [{"n": "b"}]),
        ([], [{"id": "a"}]),
        ([1, 2], [2, 1]),
        (1, 1.0),
        (1, True),
        (0, False),
        (0.0, -0.0),
        ({"__proto__": 1}, {"__proto__": 2}),
    ],
)
def test_what_nothing_tells_apart_is_sent_whole(old: Any, new: Any) -> None:
    assert difference(old, new) == {"set": new}


NODE = """
const source = require("fs").readFileSync(process.argv[1], "utf8");
const body = source.slice(source.indexOf("export function patched")).split("\\nclass ")[0];
const patched = new Function(body.replace("export ", "") + "; return patched;")();
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(cases.map(([old, patch]) => patched(old, patch))));
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_applies_it_as_it_is_meant() -> None:
    """The function of the page itself, with names that mean something in JavaScript."""
    cases: list[tuple[Any, Any]] = []

    @given(documents, documents)
    @settings(max_examples=300, database=None)
    def collect(old: Any, new: Any) -> None:
        if difference(old, new) is not None:
            cases.append((old, new))

    collect()
    sent = [(old, difference(old, new)) for old, new in cases]
    run = subprocess.run(
        ["node", "-e", NODE, str(LIVE)],
        input=msgspec.json.encode(sent),
        capture_output=True,
        timeout=60,
        check=True,
    )
    # JavaScript has one kind of number.
    found = json.loads(run.stdout, parse_int=float)
    for (_, new), applied in zip(cases, found, strict=True):
        wanted = json.loads(msgspec.json.encode(new), parse_int=float)
        assert applied == wanted
