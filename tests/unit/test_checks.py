"""What a job's meta may hold."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from tickwheel.checks import checked_job, checked_meta
from tickwheel.errors import BadArguments
from tickwheel.job import Job


class _Kind(StrEnum):
    LARGE = "large"


class _Text(str):
    def __str__(self) -> str:
        return "another text"


class TestCheckedMeta:
    @pytest.mark.parametrize("nothing", [None, {}, MappingProxyType({})])
    def test_nothing_is_none(self, nothing: Any) -> None:
        assert checked_meta(nothing) is None

    def test_it_is_a_copy_in_the_order_that_was_given(self) -> None:
        mine = {"b": "1", "a": "", "größe": "x" * 256, "n" * 64: "line\nbreak"}
        checked = checked_meta(mine)
        mine["late"] = "2"
        assert checked is not None
        assert list(checked) == ["b", "a", "größe", "n" * 64]

    def test_any_mapping_and_any_kind_of_str_will_do(self) -> None:
        checked = checked_meta(MappingProxyType({_Kind.LARGE: _Text("as it is")}))
        assert checked == {"large": "as it is"}
        assert msgspec.json.encode(checked) == b'{"large":"as it is"}'

    @pytest.mark.parametrize(
        ("meta", "words"),
        [
            (["customer"], "must be a dict of strings"),
            ("customer=42", "must be a dict of strings"),
            (42, "must be a dict of strings"),
            ([], "must be a dict of strings"),
            ({str(n): "" for n in range(17)}, "17 entries, and may have 16"),
            ({"": "x"}, "1 to 64 characters"),
            ({"n" * 65: "x"}, "1 to 64 characters"),
            ({42: "x"}, "1 to 64 characters, not 42"),
            ({"a\nb": "x"}, "printable"),
            ({"a\ud800": "x"}, "printable"),
            ({"customer": 42}, r"meta\['customer'\]=42: must be a str"),
            ({"customer": None}, "must be a str"),
            ({"customer": "x" * 257}, "257 characters, and may have 256"),
            ({"customer": "a\ud800"}, "lone surrogate"),
            ({"customer": "a\0"}, "NUL"),
        ],
    )
    def test_what_no_store_could_keep_is_refused(self, meta: Any, words: str) -> None:
        with pytest.raises(BadArguments, match=words):
            checked_meta(meta)


class TestCheckedJob:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"meta": {"customer": "x" * 257}}, "257 characters"),
            ({"expires_ms": -1}, "expires_ms=-1: must be in the years"),
            ({"expires_ms": 10**15}, "must be in the years"),
        ],
    )
    def test_a_job_from_elsewhere_is_checked(self, change: dict[str, Any], words: str) -> None:
        job = Job(id="a", task="email", payload="{}", due_ms=0, created_ms=0)
        assert checked_job(job) is job
        with pytest.raises(BadArguments, match=words):
            checked_job(msgspec.structs.replace(job, **change))
