"""The OpenAPI 3.1 document, from the table of operations. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tickwheel.http.problems import MEDIA_TYPE, Kind, ProblemDetails
from tickwheel.http.table import Operation
from tickwheel.version import __version__

# What any operation may answer with; with a key, with a body, with names in its path.
ALWAYS = (
    *(Kind.BAD_REQUEST, Kind.URI_TOO_LONG, Kind.HEADERS_TOO_LARGE),
    *(Kind.INTERNAL, Kind.OVERLOADED, Kind.STORE_UNAVAILABLE),
)
WITH_SCOPE = (Kind.UNAUTHORIZED, Kind.FORBIDDEN, Kind.HOST_NOT_ALLOWED, Kind.RATE_LIMITED)
WITH_BODY = (
    *(Kind.REQUEST_TIMEOUT, Kind.TOO_LARGE, Kind.UNSUPPORTED_MEDIA_TYPE),
    *(Kind.INVALID,),
)
REF = "#/components/schemas/{name}"


def document(operations: Iterable[Operation], root: str, cookie: str) -> dict[str, Any]:
    """The document of these operations, for a server at this path with this cookie."""
    known = list(operations)
    types = list(dict.fromkeys(_types(known)))
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in known:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(each, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tickwheel",
            "version": __version__,
            "description": "Jobs at the time you choose, for programs in any language.",
        },
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": cookie},
            },
        },
    }


def _types(operations: Iterable[Operation]) -> Iterator[Any]:
    yield ProblemDetails
    for each in operations:
        yield from each.answers.values()
        if each.body is not None:
            yield each.body
        if each.query is not None:
            yield from (field.type for field in msgspec.structs.fields(each.query))


def _described(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "description": operation.description,
        "parameters": [*_in_path(operation), *_in_query(operation, schema_of)],
        "responses": {
            **{
                str(status): _answer(kind, schema_of, operation.media)
                for status, kind in operation.answers.items()
            },
            **_problems(operation),
        },
        "security": [] if operation.scope is None else [{"key": []}, {"session": []}],
        "x-scope": operation.scope,
    }
    if operation.idempotent:
        found["parameters"].append(_IDEMPOTENCY_KEY)
    if operation.body is not None:
        content = {"application/json": {"schema": schema_of[operation.body]}}
        found["requestBody"] = {"required": True, "content": content}
    return found


_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "Repeats of a request with the same key add nothing; it may be quoted.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
}


def _in_path(operation: Operation) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name in operation.parameters
    ]


def _in_query(operation: Operation, schema_of: dict[Any, Any]) -> list[dict[str, Any]]:
    if operation.query is None:
        return []
    return [
        {
            "name": field.encode_name,
            "in": "query",
            "required": field.required,
            "schema": _without_null(schema_of[field.type]),
        }
        for field in msgspec.structs.fields(operation.query)
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter that is not given is left out: a query has no null."""
    if "anyOf" not in schema:
        return schema
    kept = [each for each in schema["anyOf"] if each.get("type") != "null"]
    return kept[0] if len(kept) == 1 else {**schema, "anyOf": kept}


def _answer(kind: Any, schema_of: dict[Any, Any], media: str) -> dict[str, Any]:
    words = (getattr(kind, "__doc__", None) or "The answer.").split("\n\n")[0]
    content = {media: {"schema": schema_of[kind]}}
    return {"description": " ".join(words.split()), "content": content}


def _problems(operation: Operation) -> dict[str, Any]:
    """By status; several kinds may share one."""
    kinds = [
        *ALWAYS,
        *(WITH_SCOPE if operation.scope is not None else ()),
        *([Kind.CROSS_ORIGIN] if operation.writes else ()),
        *(WITH_BODY if operation.body is not None else ()),
        *([Kind.NOT_FOUND] if operation.parameters else ()),
        *([Kind.INVALID] if operation.parameters and operation.body is not None else ()),
        *operation.problems,
    ]
    found: dict[str, Any] = {}
    schema = {"$ref": REF.format(name="ProblemDetails")}
    for kind in dict.fromkeys(kinds):
        answer = found.setdefault(
            str(kind.status), {"description": "", "content": {MEDIA_TYPE: {"schema": schema}}}
        )
        words = f"`{kind.type}`: {kind.title}."
        answer["description"] = f"{answer['description']} {words}".strip()
    return found
