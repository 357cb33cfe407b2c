"""Read what a request brings, within limits that are checked before anything is parsed."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.requests import ClientDisconnect, Request

from tickwheel.http.problems import Kind, Problem

HEADERS_BYTES, HEADERS_COUNT = 16 * 1024, 64
URL_BYTES = 8192
QUERY_COUNT = 32
# How deeply arguments may be nested.
DEPTH = 64

_KEY = re.compile(r"[\x20-\x7e]{1,128}")


def check_sizes(request: Request) -> None:
    """Refuse a request whose URL or headers are too large."""
    headers = request.scope["headers"]
    if len(headers) > HEADERS_COUNT or sum(len(n) + len(v) for n, v in headers) > HEADERS_BYTES:
        raise Problem(Kind.HEADERS_TOO_LARGE)
    if len(request.scope["path"]) + len(request.scope["query_string"]) > URL_BYTES:
        raise Problem(Kind.URI_TOO_LONG)


def read_path(request: Request) -> dict[str, str]:
    """The names in the path. They arrive quoted, so that an id may contain a slash."""
    try:
        return {name: unquote(text, errors="strict") for name, text in request.path_params.items()}
    except UnicodeDecodeError:
        raise Problem(Kind.NOT_FOUND, "the path is not UTF-8") from None


def read_query(request: Request, kind: Any) -> Any:
    """The query as the struct `kind`, or None if the operation has no parameters."""
    text = request.scope["query_string"]
    if kind is None and not text:
        return None
    try:
        pairs = parse_qsl(
            text.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(text),
            errors="strict",
            max_num_fields=QUERY_COUNT,
        )
    except ValueError:
        raise Problem(Kind.BAD_REQUEST, "the query is not valid; quote it in UTF-8") from None
    known = {} if kind is None else _parameters(kind)
    for name, count in Counter(name for name, _ in pairs).items():
        if name not in known:
            has = f"; it has {', '.join(known)}" if known else ""
            raise Problem(Kind.BAD_REQUEST, f"there is no parameter {name[:80]!r} here{has}")
        if count > 1 and not _is_list(known[name]):
            raise Problem(Kind.BAD_REQUEST, f"the parameter {name!r} is given twice")
    if kind is None:
        return None
    values = {
        name: _parameter(name, [t for n, t in pairs if n == name], known[name])
        if _is_list(known[name])
        else _parameter(name, text, known[name])
        for name, text in pairs
    }
    for field in msgspec.structs.fields(kind):
        if field.required and field.encode_name not in values:
            raise Problem(Kind.BAD_REQUEST, f"the parameter {field.encode_name!r} is missing")
    return kind(**{_attribute(kind, name): value for name, value in values.items()})


@functools.cache
def _parameters(kind: Any) -> dict[str, Any]:
    """The type of each parameter. One that is not given is left out: a query has no null."""
    return {field.encode_name: _without_none(field.type) for field in msgspec.structs.fields(kind)}


@functools.cache
def _attribute(kind: Any, name: str) -> str:
    """A parameter may have a name that is a word of Python's."""
    return next(each.name for each in msgspec.structs.fields(kind) if each.encode_name == name)


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    [given] = [each for each in typing.get_args(kind) if each is not types.NoneType]
    return given


def _is_list(kind: Any) -> bool:
    """Whether a parameter may be given several times. Its type may be annotated."""
    plain = kind.__origin__ if typing.get_origin(kind) is typing.Annotated else kind
    return typing.get_origin(plain) is list


def _parameter(name: str, text: str | list[str], kind: Any) -> Any:
    try:
        return msgspec.convert(text, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise Problem(Kind.BAD_REQUEST, f"the parameter {name!r}: {error}") from None


async def read_body(request: Request, limit: int, room: Callable[[int], None]) -> bytes:
    """The whole body, at most `limit` bytes. `room` is told of each part before it is kept."""
    _check_type(request.headers)
    size = request.headers.get("content-length", "")
    if size.isdecimal() and int(size) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    left = limit
    try:
        async for part in request.stream():
            left -= len(part)
            if left < 0:
                raise _too_large(limit)
            room(len(part))
            parts.append(part)
    except ClientDisconnect:
        raise Problem(Kind.BAD_REQUEST, "the connection was closed") from None
    return b"".join(parts)


def _check_type(headers: Mapping[str, str]) -> None:
    kind, _, rest = headers.get("content-type", "").partition(";")
    charset = rest.strip().lower().partition("charset=")[2].strip('"')
    if (
        kind.strip().lower() != "application/json"
        or charset not in ("", "utf-8", "utf8", "us-ascii")
        or headers.get("content-encoding", "identity").lower() != "identity"
    ):
        raise Problem(Kind.UNSUPPORTED_MEDIA_TYPE)


def _too_large(limit: int) -> Problem:
    # The rest of the body is not read, so the connection can't be used again.
    words = f"the body may have {limit:,} bytes"
    return Problem(Kind.TOO_LARGE, words, headers={"Connection": "close"})


def decode(body: bytes, kind: Any) -> Any:
    """The body as the struct `kind`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise Problem(Kind.INVALID, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(Kind.BAD_REQUEST, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise Problem(Kind.INVALID, f"the body is nested more than {DEPTH} levels deep") from None


def check_depth(value: Any, room: int = DEPTH) -> None:
    """Refuse a value that is nested too deeply."""
    inside: Iterable[Any]
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list):
        inside = value
    else:
        return
    if not room:
        raise Problem(Kind.INVALID, f"it is nested more than {DEPTH} levels deep")
    for each in inside:
        check_depth(each, room - 1)


def read_idempotency_key(headers: Mapping[str, str]) -> str | None:
    """The header's value, which may be quoted."""
    text = headers.get("idempotency-key")
    if text is None:
        return None
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = text[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    if not _KEY.fullmatch(text):
        raise Problem(
            Kind.BAD_REQUEST, "an Idempotency-Key must be 1 to 128 printable ASCII characters"
        )
    return text
