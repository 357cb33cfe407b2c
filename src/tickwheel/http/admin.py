"""API keys and the audit log."""

from __future__ import annotations

import msgspec

from tickwheel.http.forms import FindEntries, NewKey
from tickwheel.http.problems import Kind, Problem
from tickwheel.http.table import Incoming, Reply, Table
from tickwheel.operate.audit import Entry
from tickwheel.operate.documents import Time, iso_ms
from tickwheel.operate.keys import Key, Scope, id_of

table = Table()


class KeyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """An API key, without its secret."""

    id: str
    name: str
    scopes: list[str]
    # Empty: all.
    queues: list[str]
    tasks: list[str]
    created: Time
    expires: Time | None
    rate: str | None


class NewKeyDocument(KeyDocument, frozen=True, kw_only=True):
    """A new API key. Its text is shown only here."""

    key: str


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    """All API keys."""

    keys: list[KeyDocument]


class KeyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to an API key."""

    id: str
    outcome: str


class EntryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One write: who did what, when, from where, and how it ended."""

    at: Time
    who: str
    action: str
    target: str
    source: str
    outcome: str
    detail: str


class EntryList(msgspec.Struct, frozen=True, kw_only=True):
    """Some entries, newest first; for the next page pass the cursor."""

    entries: list[EntryDocument]
    cursor: str | None


def _fields(key: Key) -> dict[str, object]:
    return {
        "id": key.id,
        "name": key.name,
        "scopes": [str(each) for each in key.scopes],
        "queues": list(key.queues),
        "tasks": list(key.tasks),
        "created": iso_ms(key.created_ms),
        "expires": None if key.expires_ms is None else iso_ms(key.expires_ms),
        "rate": key.rate,
    }


@table.operation(
    "POST",
    "/v1/keys",
    scope=Scope.ADMIN,
    summary="Create an API key",
    body=NewKey,
    answers={201: NewKeyDocument},
)
async def create_key(incoming: Incoming) -> Reply:
    """The answer has its text, which is not kept and can't be read again. From the first key on,
    every request needs one."""
    keys, form = await incoming.service.keys(), incoming.body
    key, text = await keys.create(
        form.name,
        form.scopes,
        queues=form.queues,
        tasks=form.tasks,
        expires=form.expires,
        rate=form.rate,
    )
    incoming.target, incoming.detail = key.id, form.name
    document = NewKeyDocument(**_fields(key), key=text)  # type: ignore[arg-type]
    return Reply(document, 201, location="/v1/keys")


@table.operation(
    "GET",
    "/v1/keys",
    scope=Scope.ADMIN,
    summary="List API keys",
    answers={200: KeyList},
)
async def list_keys(incoming: Incoming) -> Reply:
    """Without their secrets."""
    found = await (await incoming.service.keys()).list()
    return Reply(KeyList(keys=[KeyDocument(**_fields(key)) for key in found]))  # type: ignore[arg-type]


@table.operation(
    "DELETE",
    "/v1/keys/{id}",
    scope=Scope.ADMIN,
    summary="Revoke an API key",
    answers={200: KeyOutcome},
)
async def revoke_key(incoming: Incoming) -> Reply:
    """By its id, or by its whole text. Requests with it are refused from now on."""
    id = incoming.target = id_of(incoming.path["id"])
    if not await (await incoming.service.keys()).revoke(id):
        raise Problem(Kind.NOT_FOUND, f"no API key has the id {id[:80]!r}")
    return Reply(KeyOutcome(id=id, outcome="revoked"))


# --- The audit log


@table.operation(
    "GET",
    "/v1/audit",
    scope=Scope.ADMIN,
    summary="Read the audit log",
    query=FindEntries,
    answers={200: EntryList},
    problems=(Kind.INVALID,),
)
async def list_audit(incoming: Incoming) -> Reply:
    """Every write: who, what, when, from where, and its outcome. Never arguments or secrets."""
    query = incoming.query
    audit = await incoming.service.audit()
    found, cursor = await audit.list(cursor=query.cursor, limit=query.limit)
    entries = [_entry_document(entry) for entry in found]
    return Reply(EntryList(entries=entries, cursor=cursor))


def _entry_document(entry: Entry) -> EntryDocument:
    return EntryDocument(
        at=iso_ms(entry.at_ms),
        who=entry.who,
        action=entry.action,
        target=entry.target,
        source=entry.source,
        outcome=entry.outcome,
        detail=entry.detail,
    )
