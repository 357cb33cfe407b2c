"""Store URLs for NATS: what they say, and what is said of those that can't be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tickwheel.errors import BadConfig
from tickwheel.stores.nats.options import Options

# An nkey seed of nobody.
SEED = "SUAMLK2ZNL35WSMW37E7UD4VZ7ELPKW7DHC3BWBSD2GCZ7IUQQXZIORRBU"


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("nats://one", [("one", 4222)]),
        ("nats://one:1", [("one", 1)]),
        ("nats://one:1,two,three:3/ns", [("one", 1), ("two", 4222), ("three", 3)]),
        ("nats://[::1]:5", [("::1", 5)]),
        ("nats://[::1]", [("::1", 4222)]),
        ("nats://u:p@one:1,two:2", [("one", 1), ("two", 2)]),
        ("nats://u:p%40x@one", [("one", 4222)]),
    ],
)
def test_hosts(url: str, hosts: list[tuple[str, int]]) -> None:
    assert Options.of(url).hosts == hosts


def test_everything_that_is_not_said_has_a_default() -> None:
    options = Options.of("nats://host")
    assert (options.namespace, options.replicas, options.shards) == ("default", None, 1)
    assert (options.ahead_ms, options.durability, options.monitor) == (1_000, "", "")
    assert (options.user, options.password, options.files) == ("", "", {})
    assert options.embedded is None and options.tls() is None


def test_everything_can_be_said() -> None:
    options = Options.of(
        "nats://ann:se%3Acret@host/my-jobs_2?replicas=3&shards=2&ahead=2s&durability=strict"
        "&monitor=http://host:8222"
    )
    assert (options.user, options.password) == ("ann", "se:cret")
    assert (options.namespace, options.replicas, options.shards) == ("my-jobs_2", 3, 2)
    assert (options.ahead_ms, options.durability) == (2_000, "strict")
    assert options.monitor == "http://host:8222"


def test_who_we_are() -> None:
    assert Options.of("nats://host").sign().public == {}
    assert Options.of("nats://ann:p@host").sign().public == {"user": "ann", "pass": "p"}
    assert Options.of("nats://sometoken@host").sign().public == {"auth_token": "sometoken"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nats://", "names hosts"),
        ("nats:///ns", "names hosts"),
        ("nats://host:port", "names hosts"),
        ("nats://one,,two", "names hosts"),
        ("nats://host/a.b", "namespace 'a.b'"),
        ("nats://host/a b", "namespace 'a b'"),
        ("nats://host/a/b", "namespace 'a/b'"),
        (f"nats://host/{'x' * 65}", "namespace"),
        ("nats://host?replicas=0", "replicas=0: it is from 1 to 5"),
        ("nats://host?replicas=six", "replicas=six"),
        ("nats://host?replicas=-1", "replicas=-1"),
        ("nats://host?replicas=", "replicas="),
        ("nats://host?shards=65", "shards=65: it is from 1 to 64"),
        ("nats://host?replica=3", "no option 'replica'"),
        ("nats://host?ahead=10ms", "ahead=10ms: it is from 750ms to 1m"),
        ("nats://host?ahead=2h", "ahead=2h"),
        ("nats://host?ahead=soon", "ahead"),
        ("nats://host?durability=maybe", "durability=maybe: it is strict or fast"),
        ("nats+embedded://", "names no folder"),
        ("nats+embedded:///", "names no folder"),
    ],
)
def test_a_url_that_cannot_be_used_is_told_why(url: str, words: str) -> None:
    with pytest.raises(BadConfig) as caught:
        Options.of(url)
    assert words in str(caught.value)


def test_a_misspelt_option_is_guessed() -> None:
    with pytest.raises(BadConfig, match="replicas"):
        Options.of("nats://host?replcas=3")


@pytest.mark.parametrize(
    "url",
    [
        "nats://ann:hunter2@host:port",
        "nats://ann:hunter2@host/a.b",
        "nats://ann:hunter2@host?replicas=9",
        "nats://ann:hunter2@host?nope=1",
        "nats://ann:hunter2@,host",
        "nats://hunter2@:x",
    ],
)
def test_no_error_holds_a_password(url: str) -> None:
    with pytest.raises(BadConfig) as caught:
        Options.of(url)
    assert "hunter2" not in str(caught.value)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(BadConfig):
        Options.of("nats://host:70000")


def test_nor_does_its_repr() -> None:
    assert "hunter2" not in repr(Options.of("nats://ann:hunter2@host"))


def test_embedded() -> None:
    options = Options.of("nats+embedded:///some%20folder?shards=2")
    assert options.embedded is not None and options.embedded.folder.name == "some folder"
    assert (options.durability, options.shards, options.hosts) == ("strict", 2, [])
    assert Options.of("nats+embedded:///f?durability=fast").durability == "fast"


def test_an_absolute_folder_is_kept_so() -> None:
    options = Options.of("nats+embedded:////var/lib/jobs")
    assert options.embedded is not None and options.embedded.folder == Path("/var/lib/jobs")


@pytest.mark.parametrize(("option", "words"), [("creds", "no NATS credentials"), ("nkey", "seed")])
def test_files_that_hold_nothing(tmp_path: Path, option: str, words: str) -> None:
    file = tmp_path / "file"
    with pytest.raises(BadConfig, match="can't be read"):
        Options.of(f"nats://host?{option}={file}").sign()
    file.write_text("nothing")
    with pytest.raises(BadConfig, match=words):
        Options.of(f"nats://host?{option}={file}").sign()


def test_an_nkey_signs_the_nonce(tmp_path: Path) -> None:
    file = tmp_path / "nkey"
    file.write_text(SEED + "\n")
    sign = Options.of(f"nats://host?nkey={file}").sign()
    assert sign.public["nkey"].startswith("U")
    assert sign.sign is not None
    assert len(sign.sign(b"nonce")) == 86


def test_a_seed_that_is_damaged_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "nkey"
    file.write_text("SX" + SEED[2:])
    with pytest.raises(BadConfig):
        Options.of(f"nats://host?nkey={file}").sign()


def test_tls_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="TLS"):
        Options.of(f"nats://host?ca={tmp_path}/none").tls()
    (tmp_path / "ca").write_text("no certificate")
    with pytest.raises(BadConfig, match="TLS"):
        Options.of(f"nats://host?ca={tmp_path}/ca").tls()
