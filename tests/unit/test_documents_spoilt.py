"""What another program has stored is shown as far as it can be."""

from __future__ import annotations

import msgspec
import pytest

from tickwheel.job import Job
from tickwheel.operate.documents import decoded, job_document


@pytest.mark.parametrize("payload", [r'{"a": "\ud800"}', '{"a": ', "[" * 100_000])
def test_arguments_that_are_no_text_are_shown_as_they_are_stored(payload: str) -> None:
    job = Job(id="a", task="t", payload=payload, due_ms=1, created_ms=1)
    assert msgspec.json.decode(msgspec.json.encode(job_document(job)))["arguments"] == payload


def test_quoted_characters_are_characters() -> None:
    assert decoded(r'{"a": "\u00e9\ud83d\ude00"}') == {"a": "é\N{GRINNING FACE}"}


def test_a_priority_that_is_none_of_ours_is_a_number() -> None:
    job = Job(id="a", task="t", payload="{}", priority=99, due_ms=1, created_ms=1)
    assert job_document(job).priority == "99"
