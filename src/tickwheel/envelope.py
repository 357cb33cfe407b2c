"""The envelope around a sealed text: signed, encrypted, or one in the other. Pure; knows no key.

A job's payload, a schedule's rule, a result, an error: each is a text to its store, and so is its
envelope, `{"tickwheel:sealed":{…},"body":…}`. What is only signed can be read without a key, but
must not be trusted. The mark has a character that no parameter's name has: no arguments begin so.
"""

from __future__ import annotations

import msgspec

from tickwheel.job import Job

# What programs without the key show instead of an encrypted text.
ENCRYPTED = "[encrypted]"
# How the error of a job begins that was not run, because it can't be trusted.
REFUSED = "refused: "
# What to do about a sealed text, as the end of a sentence.
GIVE_KEYS = (
    "give this program the keys that its jobs are sealed with: App(…, signing_keys=…, "
    "encryption_keys=…), or TICKWHEEL_SIGNING_KEYS and TICKWHEEL_ENCRYPTION_KEYS"
)

_MARK = '{"tickwheel:sealed":'
_BODY = ',"body":'
# A seal that we write has far fewer characters. What others write may be anything.
_SEAL_LIMIT = 500
# A signed text may have an encrypted one inside.
_LAYERS = 2


class Seal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What an envelope says of its body."""

    # The key that signed it, and the signature.
    signed: str | None = None
    mac: str = ""
    # Of a job: when it was due, and when it was to expire, as it was signed. Its steps change both.
    due_ms: int | None = None
    expires_ms: int | None = None
    # The key that its body, in base64, is encrypted with.
    encrypted: str | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Seal).decode


def is_sealed(text: str | None) -> bool:
    return text is not None and text.startswith(_MARK)


def is_signed(text: str | None) -> bool:
    if text is None or not is_sealed(text):
        return False
    found = unwrapped(text)
    return found is not None and found[0].signed is not None


def wrapped(seal: Seal, body: str) -> str:
    """The envelope of this body, which is JSON, and stays as it is to the letter."""
    return f"{_MARK}{_encode(seal).decode()}{_BODY}{body}}}"


def unwrapped(text: str) -> tuple[Seal, str] | None:
    """The seal and the body; None if the envelope is broken."""
    # The seal has no such text in it: its strings are ids of keys and base64.
    seal, mark, body = text[len(_MARK) :].partition(_BODY)
    if not mark or len(seal) > _SEAL_LIMIT or not body.endswith("}"):
        return None
    try:
        return _decode(seal), body[:-1]
    except (msgspec.MsgspecError, UnicodeError):
        return None


def bare(text: str) -> str | None:
    """The text in its envelopes, whoever wrote it; None if it is encrypted or an envelope is
    broken."""
    for _ in range(_LAYERS):
        if not is_sealed(text):
            break
        found = unwrapped(text)
        if found is None or found[0].encrypted is not None:
            return None
        text = found[1]
    return None if is_sealed(text) else text


def readable(job: Job) -> Job:
    """The job with "[encrypted]" in place of what this program could not open. To be shown."""
    changes: dict[str, object] = {}
    if is_sealed(job.payload):
        changes["payload"] = json_or_hidden(job.payload)
    if job.result is not None and is_sealed(job.result):
        changes["result"] = json_or_hidden(job.result)
    for name in ("error", "traceback"):
        if is_sealed(getattr(job, name)):
            changes[name] = ENCRYPTED
    if any(is_sealed(run.error) for run in job.history):
        changes["history"] = tuple(
            msgspec.structs.replace(run, error=ENCRYPTED) if is_sealed(run.error) else run
            for run in job.history
        )
    return msgspec.structs.replace(job, **changes) if changes else job


def json_or_hidden(text: str) -> str:
    """JSON to be shown in place of a text that may be sealed."""
    inside = bare(text)
    return f'"{ENCRYPTED}"' if inside is None else inside
