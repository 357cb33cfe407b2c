"""Store URLs for NATS: what they say, and what is said of those that can't be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tickwheel.errors import BadConfig
from tickwheel.stores.nats.url import NatsOptions

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
    assert NatsOptions.of(url).hosts == hosts


def test_everything_that_is_not_said_has_a_default() -> None:
    options = NatsOptions.of("nats://host")
    assert (options.namespace, options.replicas, options.shards) == ("default", None, 1)
    assert (options.ahead_ms, options.durability, options.monitor) == (1_000, "", "")
    assert (options.user, options.password, options.files) == ("", "", {})
    assert options.embedded is None and options.tls() is None


def test_everything_can_be_said() -> None:
    options = NatsOptions.of(
        "nats://ann:se%3Acret@host/my-jobs_2?replicas=3&shards=2&ahead=2s&durability=strict"
        "&monitor=http://host:8222"
    )
    assert (options.user, options.password) == ("ann", "se:cret")
    assert (options.namespace, options.replicas, options.shards) == ("my-jobs_2", 3, 2)
    assert (options.ahead_ms, options.durability) == (2_000, "strict")
    assert options.monitor == "http://host:8222"


def test_who_we_are() -> None:
    assert NatsOptions.of("nats://host").credentials().public == {}
    assert NatsOptions.of("nats://ann:p@host").credentials().public == {"user": "ann", "pass": "p"}
    assert NatsOptions.of("nats://sometoken@host").credentials().public == {
        "auth_token": "sometoken"
    }


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nats://", "must name a host"),
        ("nats:///ns", "must name a host"),
        ("nats://host:port", "must name a host"),
        ("nats://one,,two", "must name a host"),
        ("nats://host/a.b", "namespace 'a.b'"),
        ("nats://host/a b", "namespace 'a b'"),
        ("nats://host/a/b", "namespace 'a/b'"),
        (f"nats://host/{'x' * 65}", "namespace"),
        ("nats://host?replicas=0", "replicas=0 in the store URL: must be a number from 1 to 5"),
        ("nats://host?replicas=six", "replicas=six"),
        ("nats://host?replicas=-1", "replicas=-1"),
        ("nats://host?replicas=", "replicas="),
        ("nats://host?shards=65", "shards=65 in the store URL: must be a number from 1 to 64"),
        ("nats://host?replica=3", "unknown option 'replica'"),
        ("nats://host?ahead=10ms", "ahead=10ms in the store URL: must be from 750ms to 1m"),
        ("nats://host?ahead=2h", "ahead=2h"),
        ("nats://host?ahead=soon", "ahead"),
        (
            "nats://host?durability=maybe",
            "durability=maybe in the store URL: must be strict or fast",
        ),
        ("nats+embedded://", "names no folder"),
        ("nats+embedded:///", "names no folder"),
    ],
)
def test_a_url_that_cannot_be_used_is_told_why(url: str, words: str) -> None:
    with pytest.raises(BadConfig) as caught:
        NatsOptions.of(url)
    assert words in str(caught.value)


def test_a_misspelt_option_is_guessed() -> None:
    with pytest.raises(BadConfig, match="replicas"):
        NatsOptions.of("nats://host?replcas=3")


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
        NatsOptions.of(url)
    assert "hunter2" not in str(caught.value)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(BadConfig):
        NatsOptions.of("nats://host:70000")


def test_nor_does_its_repr() -> None:
    assert "hunter2" not in repr(NatsOptions.of("nats://ann:hunter2@host"))


def test_embedded() -> None:
    options = NatsOptions.of("nats+embedded:///some%20folder?shards=2")
    assert options.embedded is not None and options.embedded.folder.name == "some folder"
    assert (options.durability, options.shards, options.hosts) == ("strict", 2, [])
    assert NatsOptions.of("nats+embedded:///f?durability=fast").durability == "fast"


def test_an_absolute_folder_is_kept_so() -> None:
    options = NatsOptions.of("nats+embedded:////var/lib/jobs")
    assert options.embedded is not None and options.embedded.folder == Path("/var/lib/jobs")


@pytest.mark.parametrize(("option", "words"), [("creds", "no NATS credentials"), ("nkey", "seed")])
def test_files_that_hold_nothing(tmp_path: Path, option: str, words: str) -> None:
    file = tmp_path / "file"
    with pytest.raises(BadConfig, match="can't be read"):
        NatsOptions.of(f"nats://host?{option}={file}").credentials()
    file.write_text("nothing")
    with pytest.raises(BadConfig, match=words):
        NatsOptions.of(f"nats://host?{option}={file}").credentials()


def test_an_nkey_signs_the_nonce(tmp_path: Path) -> None:
    file = tmp_path / "nkey"
    file.write_text(SEED + "\n")
    found = NatsOptions.of(f"nats://host?nkey={file}").credentials()
    assert found.public["nkey"].startswith("U")
    assert found.sign is not None
    assert len(found.sign(b"nonce")) == 86


def test_a_seed_that_is_damaged_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "nkey"
    file.write_text("SX" + SEED[2:])
    with pytest.raises(BadConfig):
        NatsOptions.of(f"nats://host?nkey={file}").credentials()


def test_tls_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="TLS"):
        NatsOptions.of(f"nats://host?ca={tmp_path}/none").tls()
    (tmp_path / "ca").write_text("no certificate")
    with pytest.raises(BadConfig, match="TLS"):
        NatsOptions.of(f"nats://host?ca={tmp_path}/ca").tls()
