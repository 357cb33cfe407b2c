"""Signing and verifying by Standard Webhooks, judged by the reference library."""

from __future__ import annotations

import base64
import subprocess
import sys
from datetime import UTC, datetime

import pytest
import standardwebhooks
from hypothesis import given, strategies as st

from tickwheel import BadArguments, BadConfig, SignatureError, webhooks

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
NOW = 1_614_265_330
BODY = b'{"test": 2432232314}'

each_vector = pytest.mark.parametrize(
    "key, id, timestamp, body, signature",
    [
        # Of the reference libraries' tests, and of the documents that the standard grew from.
        (
            KEY,
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            NOW,
            BODY,
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        ),
        (
            OTHER,
            "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk",
            1_649_367_553,
            b'{"email":"test@example.com","username":"test_user"}',
            "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=",
        ),
    ],
)


def signed(body: bytes = BODY, id: str = "msg_1", keys: str | list[str] = KEY) -> dict[str, str]:
    return webhooks.sign(body, id=id, keys=keys, timestamp=NOW)


@each_vector
def test_signatures_are_those_of_the_published_vectors(
    key: str, id: str, timestamp: int, body: bytes, signature: str
) -> None:
    headers = webhooks.sign(body, id=id, keys=key, timestamp=timestamp)
    assert headers == {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature,
    }
    assert webhooks.verify(body, headers, key, now=timestamp) == id


def test_ed25519_is_that_of_rfc_8032() -> None:
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    whsk = f"whsk_{base64.b64encode(seed + public).decode()}"
    whpk = f"whpk_{base64.b64encode(public).decode()}"
    headers = signed(keys=whsk)
    assert headers["webhook-signature"].startswith("v1a,")
    for key in (whsk, whpk, f"whsk_{base64.b64encode(seed).decode()}"):
        assert webhooks.verify(BODY, headers, key, now=NOW) == "msg_1"
        with pytest.raises(SignatureError, match="not signed with a key"):
            webhooks.verify(BODY + b" ", headers, key, now=NOW)
    with pytest.raises(BadConfig, match="damaged"):
        signed(keys=f"whsk_{base64.b64encode(seed + seed).decode()}")
    with pytest.raises(BadConfig, match="only public keys"):
        signed(keys=whpk)


@given(st.text(), st.binary(min_size=24, max_size=64))
def test_the_reference_library_accepts_what_we_sign_and_we_what_it_signs(
    text: str, secret: bytes
) -> None:
    key = f"whsec_{base64.b64encode(secret).decode()}"
    judge = standardwebhooks.Webhook(key)
    now = datetime.now(UTC)
    headers = webhooks.sign(text.encode(), id="msg_1", keys=key)
    judge.verify(text.encode(), headers, json_parse=False)
    theirs = {
        "Webhook-Id": "msg_1",
        "Webhook-Timestamp": str(int(now.timestamp())),
        "Webhook-Signature": judge.sign("msg_1", now, text),
    }
    assert webhooks.verify(text.encode(), theirs, key) == "msg_1"


def test_with_several_keys_any_one_of_them_is_enough_on_both_sides() -> None:
    whsk, whpk = webhooks.new_key_pair()
    headers = signed(keys=[KEY, OTHER, whsk])
    assert [each[:3] for each in headers["webhook-signature"].split()] == ["v1,", "v1,", "v1a"]
    for key in (KEY, OTHER, whpk, [webhooks.new_key(), OTHER]):
        assert webhooks.verify(BODY, headers, key, now=NOW) == "msg_1"
    with pytest.raises(SignatureError):
        webhooks.verify(BODY, headers, webhooks.new_key(), now=NOW)
    with pytest.raises(SignatureError):
        webhooks.verify(BODY, headers, webhooks.new_key_pair()[1], now=NOW)


@pytest.mark.parametrize("away_s", [-301, 301])
def test_what_was_sent_too_long_ago_or_in_the_future_is_refused(away_s: int) -> None:
    headers = signed()
    with pytest.raises(SignatureError, match=r"too far in the (past|future)"):
        webhooks.verify(BODY, headers, KEY, now=NOW + away_s)
    assert webhooks.verify(BODY, headers, KEY, now=NOW + away_s, tolerance="6m")
    nearer = away_s - (1 if away_s > 0 else -1)
    assert webhooks.verify(BODY, headers, KEY, now=NOW + nearer)


def test_the_time_is_now_unless_given() -> None:
    assert webhooks.verify(BODY, webhooks.sign(BODY, id="a", keys=KEY), KEY) == "a"
    with pytest.raises(SignatureError, match="past"):
        webhooks.verify(BODY, signed(), KEY)


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_header_that_is_missing_or_changed_is_refused(name: str) -> None:
    headers = signed()
    for value in (None, "", "1", "é", "\ud800", "a.b", f"{headers[name]}0", "v1", "v1,", "," * 99):
        changed = {**headers, name: value}
        with pytest.raises(SignatureError):
            webhooks.verify(BODY, changed, KEY, now=NOW)  # type: ignore[arg-type]
    del headers[name]
    with pytest.raises(SignatureError, match=f"{name} is missing"):
        webhooks.verify(BODY, headers, KEY, now=NOW)


def test_names_of_headers_may_be_written_in_any_case_but_not_twice() -> None:
    headers = signed()
    assert webhooks.verify(BODY, {k.upper(): v for k, v in headers.items()}, KEY, now=NOW)
    with pytest.raises(SignatureError, match="twice"):
        webhooks.verify(BODY, {**headers, "Webhook-Id": "other"}, KEY, now=NOW)


def test_an_id_can_not_swallow_the_start_of_a_body() -> None:
    """`a.1.2.x` is what is signed for the id `a`, and would be for the id `a.1` too."""
    headers = webhooks.sign(b"%d.rest" % NOW, id="a", keys=KEY, timestamp=NOW)
    with pytest.raises(SignatureError, match="webhook-id is malformed"):
        webhooks.verify(b"rest", {**headers, "webhook-id": f"a.{NOW}"}, KEY, now=NOW)


words = st.one_of(
    st.text(),
    st.text("v1a,= .AB+/0123456789"),
    st.sampled_from([signed()[name] for name in sorted(signed())]),
    st.none(),
    st.binary(),
    st.integers(),
)


@given(
    body=st.binary(),
    headers=st.fixed_dictionaries(
        {},
        optional={
            "webhook-id": words,
            "webhook-timestamp": words,
            "webhook-signature": words,
            "Webhook-Id": words,
        },
    ),
)
def test_whatever_comes_nothing_but_a_signature_error_is_raised(
    body: bytes, headers: dict[str, str]
) -> None:
    with pytest.raises(SignatureError):
        webhooks.verify(body, headers, [KEY, webhooks.new_key()], now=NOW + 1_000)


@given(st.binary())
def test_a_body_may_be_any_bytes(body: bytes) -> None:
    assert webhooks.verify(body, signed(body), KEY, now=NOW) == "msg_1"
    assert webhooks.verify(memoryview(body), signed(body), KEY, now=NOW)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key",
    ["", "whsec_", "whsec_c2hvcnQ=", "secret", "whpk_c2hvcnQ=", "whsec_é", f"whsec_{'A' * 200}"],
)
def test_a_bad_key_is_the_callers_mistake_and_is_not_shown(key: str) -> None:
    for keys in (key, [KEY, key]):
        with pytest.raises(BadConfig) as error:
            webhooks.verify(BODY, signed(), keys, now=NOW)
        assert not key or key not in str(error.value).replace("whsec_", "", 1) or len(key) < 8


@pytest.mark.parametrize("keys", [[], None, 7, [None], [["x"]]])
def test_no_key_is_the_callers_mistake(keys: object) -> None:
    with pytest.raises(BadConfig, match="must be a key"):
        webhooks.verify(BODY, signed(), keys, now=NOW)  # type: ignore[arg-type]


def test_text_instead_of_bytes_is_the_callers_mistake() -> None:
    with pytest.raises(BadArguments, match="must be bytes"):
        webhooks.verify("text", signed(), KEY, now=NOW)  # type: ignore[arg-type]
    with pytest.raises(BadArguments, match="must be the headers"):
        webhooks.verify(BODY, [("webhook-id", "1")], KEY, now=NOW)  # type: ignore[arg-type]


@pytest.mark.parametrize("id", ["", "a.b", "a b", "a\n", "é", "x" * 257])
def test_an_id_that_can_not_be_signed_is_refused(id: str) -> None:
    with pytest.raises(BadArguments, match="visible ASCII"):
        webhooks.sign(BODY, id=id, keys=KEY)


def test_an_id_is_new_once_within_the_window() -> None:
    recent = webhooks.RecentIds(limit=2, window="10s")
    assert recent.add("a", now=0) and not recent.add("a", now=9)
    assert recent.add("a", now=10)
    recent.forget("a")
    assert recent.add("a", now=11)
    assert recent.add("b", now=12) and recent.add("c", now=13) and len(recent) == 2
    assert recent.add("a", now=14), "the oldest is forgotten when there are too many"


def test_shared_secrets_need_no_other_library() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from tickwheel import BadConfig, webhooks\n"
        "key = webhooks.new_key()\n"
        "webhooks.verify(b'', webhooks.sign(b'', id='a', keys=key), key)\n"
        "try: webhooks.new_key_pair()\n"
        "except BadConfig as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'tickwheel[ed25519]'" in ran.stdout
