"""Which parked jobs are told of, which notes go with them, where a page of them goes on. Pure."""

from __future__ import annotations

import pytest

from tickwheel.job import Job
from tickwheel.stores.nats.browse import source_of
from tickwheel.stores.nats.parked import ALL, Part, arrivals_of, look_pause
from tickwheel.stores.nats.publishing import portioned
from tickwheel.stores.nats.steps import Layout, Line, Step, line_of

LAYOUT = Layout("ns", 0, 1_000)


def job(id: str, task: str = "mail", queue: str = "default") -> Job:
    return Job(id=id, task=task, payload="{}", queue=queue, due_ms=0, created_ms=0)


# --- Notes


def batches(jobs: list[Job], most: int) -> list[list[str]]:
    """The last parts of the subjects of each batch that parks these jobs."""

    def write(job: Job) -> list[Step]:
        return [LAYOUT.note(line_of(job)), Step(f"tw.ns.0.t.p.x.{job.id}", "", b"")]

    chunks = portioned({job.id: job for job in jobs}, write, most=most, most_bytes=1_000)
    return [
        [step.subject.rpartition(".")[2] for _, _, group in chunk for step in group]
        for chunk in chunks
    ]


def test_each_batch_has_the_note_of_each_of_its_lines_once_and_first() -> None:
    jobs = [job("a"), job("b", "bill"), job("c"), job("d", "bill"), job("e")]
    assert batches(jobs, 100) == [["%1-mail", "a", "%1-bill", "b", "c", "d", "e"]]


@pytest.mark.parametrize("most", range(2, 12))
def test_no_batch_is_without_the_note_of_a_job_or_larger_than_the_server_takes(most: int) -> None:
    jobs = [job(f"{task}{n}", task) for n in range(10) for task in ("mail", "bill")]
    found = batches(jobs, most)
    assert [each for batch in found for each in batch if "%" not in each] == [
        job.id for job in jobs
    ]
    for batch in found:
        assert len(batch) <= most
        assert len(batch) == len(set(batch)), "a note came twice"
        for n, each in enumerate(batch):
            if "%" not in each:
                assert f"%1-{each[:4]}" in batch[:n]


# --- News


def test_news_name_the_first_and_the_last_job_of_each_line() -> None:
    jobs = [job("a"), job("b", "bill"), job("c"), job("d", queue="other")]
    news = arrivals_of(jobs, {"a": 7, "b": 8, "c": 9, "d": 11})
    assert news == {
        Line("default", 1, "mail"): Part(7, 9),
        Line("default", 1, "bill"): Part(8, 8),
        Line("other", 1, "mail"): Part(11, 11),
    }


def test_who_repeats_a_settlement_tells_of_the_whole_line() -> None:
    assert arrivals_of([job("a"), job("b")], {"a": 0, "b": 9}) == {Line("default", 1, "mail"): ALL}


def test_there_is_no_news_of_a_job_that_was_not_parked() -> None:
    assert arrivals_of([job("a")], {}) == {}


def test_many_notes_are_read_less_often() -> None:
    assert look_pause(0) == look_pause(300) == 1
    assert look_pause(5_000) == 10


# --- Pages


@pytest.mark.parametrize(
    ("name", "index"),
    [("", 0), ("0", 0), ("2", 2), ("7", 5), ("pa", 3), ("pb", 4), ("pc", 4), ("pz", 5), ("?", 0)],
)
def test_a_page_goes_on_at_its_source_or_at_the_next(name: str, index: int) -> None:
    assert source_of(name, ["0", "1", "2", "pa", "pc"]) == index
