"""What a postgresql:// URL says, what is wrong with it, and that no password is ever shown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tickwheel.errors import BadConfig
from tickwheel.job import Job
from tickwheel.store import open_store
from tickwheel.stores.postgres.health import judged
from tickwheel.stores.postgres.schema import parts_of
from tickwheel.stores.postgres.statements import adding
from tickwheel.stores.postgres.store import PostgresStore
from tickwheel.stores.postgres.url import PostgresOptions

URL = "postgresql://ann:s3cret@db.example.com:6432/shop"


def test_a_url_names_host_database_and_user() -> None:
    options = PostgresOptions.of(URL)
    known = {name: options.conninfo[name] for name in ("host", "port", "dbname", "user")}
    assert known == {
        "host": "db.example.com",
        "port": "6432",
        "dbname": "shop",
        "user": "ann",
    }
    assert (options.schema, options.ahead_ms, options.timeout_ms) == ("tickwheel", 1000, 15_000)


def test_our_options_are_read_and_the_drivers_passed_on() -> None:
    options = PostgresOptions.of(f"{URL}?schema=jobs&ahead=500ms&timeout=2s&pool=8&sslmode=require")
    assert (options.schema, options.ahead_ms, options.timeout_ms) == ("jobs", 500, 2000)
    assert options.pool == 8
    assert options.conninfo["sslmode"] == "require"
    assert not {"schema", "ahead", "timeout", "pool"} & set(options.conninfo)


def test_the_drivers_options_are_passed_on_as_they_were_written() -> None:
    options = PostgresOptions.of(
        f"{URL}?options=-c%20work_mem%3D8MB&schema=jobs&application_name=a+b"
    )
    assert options.conninfo["options"] == "-c work_mem=8MB"
    assert options.conninfo["application_name"] == "a+b"


def test_a_dead_line_is_noticed_unless_the_url_says_otherwise() -> None:
    assert PostgresOptions.of(URL).conninfo["keepalives_idle"] == "10"
    assert PostgresOptions.of(f"{URL}?keepalives_idle=99").conninfo["keepalives_idle"] == "99"


def test_of_several_hosts_the_one_that_takes_writes_is_wanted() -> None:
    assert "target_session_attrs" not in PostgresOptions.of(URL).conninfo
    several = PostgresOptions.of("postgresql://ann@one,two/shop")
    assert several.conninfo["target_session_attrs"] == "read-write"


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_both_names_of_the_scheme_open_the_store(scheme: str) -> None:
    assert isinstance(open_store(f"{scheme}://host/shop"), PostgresStore)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("colour=red", "unknown option 'colour'"),
        ("schema=Jobs", "schema=Jobs"),
        ("schema=a;drop", "schema=a;drop"),
        ("schema=pg_x", "pg_"),
        ("pool=0", "pool=0"),
        ("pool=many", "pool=many"),
        ("ahead=soon", "ahead"),
        ("timeout=-1s", "timeout"),
    ],
)
def test_a_wrong_option_is_named(query: str, words: str) -> None:
    with pytest.raises(BadConfig, match=words) as raised:
        PostgresOptions.of(f"{URL}?{query}")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    "password", ["s3/cret", "12/s3cret", "s3?cret", "s3@cret/x", "s3:cret/x", "s3%zzcret"]
)
def test_a_password_that_was_not_quoted_is_refused_and_not_shown(password: str) -> None:
    with pytest.raises(BadConfig, match="%2F") as raised:
        PostgresOptions.of(f"postgresql://ann:{password}@host/shop")
    assert "cret" not in str(raised.value)


def test_the_password_is_not_shown() -> None:
    options = PostgresOptions.of(URL)
    assert "s3cret" not in repr(options)
    assert options.where == "db.example.com:6432/shop"


def test_without_its_driver_the_store_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from tickwheel.store import open_store\n"
        "open_store('postgresql://host/shop')"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "BadConfig" in ran.stderr and "pip install 'tickwheel[postgresql]'" in ran.stderr


def test_another_schema_takes_the_place_of_ours_everywhere() -> None:
    for part in parts_of("jobs"):
        statements = [line for line in part.splitlines() if not line.strip().startswith("--")]
        assert not [line for line in statements if "tickwheel" in line]


def test_jobs_are_added_in_the_order_of_their_ids() -> None:
    """Two batches then wait for one another's ids, but never in a circle."""
    jobs = [Job(id=id, task="t", payload="{}", due_ms=1, created_ms=1) for id in "bca"]
    statement, parameters = adding(jobs, "jobs")
    assert "into jobs.job" in statement
    text = parameters["jobs"]
    assert text.index('"a"') < text.index('"b"') < text.index('"c"')


SAFE = {
    "synchronous_commit": "on",
    "fsync": "on",
    "full_page_writes": "on",
    "wal_level": "replica",
    "synchronous_standby_names": "",
}


@pytest.mark.parametrize(
    ("changes", "survives"),
    [
        ({}, (True, True, False)),
        ({"synchronous_standby_names": "one"}, (True, True, True)),
        ({"synchronous_standby_names": "one", "synchronous_commit": "local"}, (True, True, False)),
        ({"synchronous_commit": "off"}, (False, False, False)),
        ({"fsync": "off"}, (True, False, False)),
        ({"full_page_writes": "off"}, (True, False, False)),
    ],
)
def test_durability_is_what_the_settings_amount_to(
    changes: dict[str, str], survives: tuple[bool, bool, bool]
) -> None:
    found = judged(SAFE | changes, server="17.1", replica=False)
    assert (found.process_crash, found.power_loss, found.machine_loss) == survives
    assert bool(found.fixes) is not found.power_loss


def test_a_replica_is_told_apart() -> None:
    assert "replica" in judged(SAFE, server="17.1", replica=True).fixes[0]
