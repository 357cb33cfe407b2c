"""The judge: what the record and the store's last word say of each job. Pure.

The rules for runs are those of `tickwheel verify`; here a fault has to explain what they find.

What it holds against a store, one rule each:

    lost        an acknowledged job is not there, has not ended, or never ran to its end
    early       a run began before its job was due, or before a retry or a snooze was over
    twice       a run followed another, and no fault had to do with the first one's lease
    cancelled   a job ran after it was said that it never will
    dead        a job died that was not to, unless faults cost it as many runs as are allowed
    disagrees   the store's word on a job is not what the record says
    quit        a worker ended by itself, or a call failed for good
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from judge.load import RETRIES, RETRY_S, SNOOZE_S, Wish
from judge.record import (
    AnyLine,
    Broke,
    CancelAnswered,
    CancelTried,
    Ended,
    Quit,
    RolledBack,
    Started,
    Stored,
    Trouble,
)
from tickwheel.engine.options import WorkerOptions
from tickwheel.operate.flaws import FlawKind, early_by, repeated_attempts, second_runs
from tickwheel.operate.verify import Verified

# A worker counts a wait from its idea of the store's time, which is behind by as long as an answer
# takes to come: on a busy machine that is not little.
BEHIND_S = 0.25
# An outcome is with the store at the latest so long after the run, where nothing is wrong.
SETTLE_S = 1.0
# A job that was lost with its worker so often in a row is taken for what kills them.
TAKEOVERS = WorkerOptions(queues=()).takeovers
# How long a job waits until it runs again because it said so.
CHOSEN_S = {"retry": RETRY_S, "snooze": SNOOZE_S}


@dataclass(frozen=True, slots=True)
class Found:
    """The store's last word on a job."""

    id: str
    number: int
    state: str
    queue: str = ""
    attempts: int = 1
    failures: int = 0
    # How often its lease ran out, and how often it was handed back.
    takeovers: int = 0
    releases: int = 0
    error: str | None = None
    # The run whose result it has.
    result: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job, from both of its lines."""

    started: Started
    ended: Ended | None

    @property
    def how(self) -> str:
        return self.ended.how if self.ended else "vanished"

    # As the rules of `tickwheel verify` see it.

    @property
    def attempt(self) -> int:
        return self.started.attempt

    @property
    def due_ms(self) -> float:
        return self.started.not_before * 1000

    @property
    def started_ms(self) -> float:
        return self.started.at * 1000

    @property
    def ended_ms(self) -> float | None:
        return self.ended.at * 1000 if self.ended else None

    @property
    def outcome(self) -> str:
        return self.how

    @property
    def attempts(self) -> set[int]:
        """The attempts that it was: several where it was claimed again while it ran."""
        first = self.started.attempt
        return set(range(first, (self.ended.attempt if self.ended else first) + 1))


@dataclass(slots=True)
class Life:
    """All that is known of one job."""

    id: str
    wish: Wish | None = None
    stored: list[Stored] = field(default_factory=list)
    rolled_back: bool = False
    cancels: list[CancelTried] = field(default_factory=list)
    answers: list[CancelAnswered] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    found: Found | None = None


@dataclass(frozen=True, slots=True, order=True)
class Complaint:
    rule: str
    id: str
    words: str


@dataclass(frozen=True, slots=True)
class Judgement:
    complaints: list[Complaint]
    acknowledged: int
    runs: int
    # Second runs that a fault explains, and those of them that one fault of all explains.
    explained: int


def judge(
    wishes: Mapping[int, Wish],
    lines: Iterable[AnyLine],
    found: Sequence[Found],
    counts: Mapping[tuple[str, str], int],
    verified: Verified | None = None,
    *,
    aftermath_s: float,
) -> Judgement:
    """`counts` is what the store says of its queues: how many jobs are in each state, where there
    are any. `verified` is what `tickwheel verify` says of its history. `aftermath_s`: how long
    after a fault a store's clients may still feel it."""
    lines = list(lines)
    lives = _lives(wishes, lines, found)
    troubles = [line for line in lines if isinstance(line, Trouble)]
    explained = [pair for life in lives for pair in _unchosen(life)]
    complaints = [
        *_quit(lines),
        *_miscounted(found, counts),
        *(_in_history(verified) if verified else ()),
        *(complaint for life in lives for complaint in _of(life, troubles, aftermath_s)),
    ]
    return Judgement(
        complaints=sorted(complaints),
        acknowledged=sum(bool(life.stored) for life in lives),
        runs=sum(len(life.runs) for life in lives),
        explained=len(explained),
    )


def _lives(
    wishes: Mapping[int, Wish], lines: Sequence[AnyLine], found: Iterable[Found]
) -> list[Life]:
    lives: dict[str, Life] = {}
    ends = {line.run: line for line in lines if isinstance(line, Ended)}

    def life(id: str) -> Life:
        return lives.setdefault(id, Life(id))

    for line in lines:
        match line:
            case Stored():
                life(line.id).stored.append(line)
                life(line.id).wish = wishes.get(line.number)
            case RolledBack():
                life(line.id).rolled_back = True
            case CancelTried():
                life(line.id).cancels.append(line)
            case CancelAnswered():
                life(line.id).answers.append(line)
            case Started():
                life(line.id).runs.append(Run(line, ends.get(line.run)))
                life(line.id).wish = wishes.get(line.number)
    for each in found:
        life(each.id).found = each
        life(each.id).wish = wishes.get(each.number)
    for each_life in lives.values():
        each_life.runs.sort(key=lambda run: (run.started.attempt, run.started.at))
    return list(lives.values())


def _quit(lines: Iterable[AnyLine]) -> Iterator[Complaint]:
    for line in lines:
        if isinstance(line, Quit):
            yield Complaint("quit", str(line.pid), line.words)
        elif isinstance(line, Broke):
            yield Complaint("quit", "", line.what)


def _miscounted(
    found: Iterable[Found], counts: Mapping[tuple[str, str], int]
) -> Iterator[Complaint]:
    there = Counter((each.queue, each.state) for each in found)
    for queue, state in sorted(there.keys() | counts.keys()):
        said, real = counts.get((queue, state), 0), there[queue, state]
        if said != real:
            yield Complaint("disagrees", queue, f"{said} are said to be {state}, {real} are")


def _in_history(verified: Verified) -> Iterator[Complaint]:
    """The store's own history has to say the same: nothing early, no double without a reason, and
    nothing missed, except for what died with its workers. Faults make runs late."""
    for flaw in verified.flaws[FlawKind.EARLY]:
        yield Complaint("early", flaw.id, f"by its history: {flaw.words}")
    for flaw in verified.flaws[FlawKind.DOUBLED]:
        if not flaw.why:
            yield Complaint("twice", flaw.id, f"by its history: {flaw.words}")
    for flaw in verified.flaws[FlawKind.MISSED]:
        if not flaw.why:
            yield Complaint("lost", flaw.id, f"by its history: {flaw.words}")


def _of(life: Life, troubles: Sequence[Trouble], aftermath_s: float) -> Iterator[Complaint]:
    if life.rolled_back:
        if life.found or life.runs:
            yield Complaint("disagrees", life.id, "it was rolled back, and is there")
        return
    if life.found is None:
        if life.stored:
            yield Complaint("lost", life.id, "acknowledged, and not in the store")
        elif life.runs:
            yield Complaint("disagrees", life.id, "it ran, and is not in the store")
        return
    yield from _early(life)
    yield from _twice(life, troubles, aftermath_s)
    yield from _cancelled(life)
    lost = sum(_explained(run, inf, troubles, aftermath_s) for run in life.runs)
    yield from _state(life, life.found, lost)
    yield from _counts(life, life.found)


# --- Rules


def _early(life: Life) -> Iterator[Complaint]:
    for run in life.runs:
        if early_ms := early_by(run):
            yield Complaint("early", life.id, f"attempt {run.attempt}: {early_ms / 1000:.3f} s")


def _unchosen(life: Life) -> Iterator[tuple[Run, Run]]:
    """Runs that followed another although the job had not chosen so, or not so soon."""
    yield from second_runs(life.runs)
    for before, after in pairwise(life.runs):
        wait_s = CHOSEN_S.get(before.how)
        if before.ended and wait_s and after.started.at < before.ended.at + wait_s - BEHIND_S:
            yield before, after


def _twice(life: Life, troubles: Sequence[Trouble], aftermath_s: float) -> Iterator[Complaint]:
    for before, after in _unchosen(life):
        if _explained(before, after.started.at, troubles, aftermath_s):
            continue
        rule = "early" if before.how in CHOSEN_S else "twice"
        yield Complaint(rule, life.id, f"{_told(after)} came after {_told(before)}")
    attempts = (attempt for run in life.runs for attempt in run.attempts)
    for attempt, count in repeated_attempts(attempts).items():
        yield Complaint("twice", life.id, f"{count} runs of attempt {attempt}")


def _explained(run: Run, lost_by: float, troubles: Sequence[Trouble], aftermath_s: float) -> bool:
    """Whether a fault may have cost a run its lease: it hit that run's process, or all, while the
    run held its job, which is until its outcome is with the store."""
    over = min(run.ended.at + SETTLE_S if run.ended else inf, lost_by)
    return any(
        trouble.pid in (0, run.started.pid)
        and trouble.at <= over
        and run.started.at <= trouble.until + aftermath_s
        for trouble in troubles
    )


def _cancelled(life: Life) -> Iterator[Complaint]:
    for answer in life.answers:
        later = [run for run in life.runs if run.started.at > answer.at]
        # A worker that was asked to stop may be about to start it.
        if len(later) > {"cancelled": 0, "asked": 1}.get(answer.answer, len(later)):
            yield Complaint("cancelled", life.id, f"{answer.answer}, then {_told(later[-1])}")
        if answer.answer == "unknown" and not any(line.on_its_way for line in life.stored):
            yield Complaint("lost", life.id, "acknowledged, and unknown to a cancel")
    answers = {answer.answer for answer in life.answers}
    state = life.found.state if life.found else ""
    if "cancelled" in answers and state != "cancelled":
        yield Complaint("cancelled", life.id, f"said to be cancelled, and is {state}")
    if state == "cancelled" and not life.cancels:
        yield Complaint("disagrees", life.id, "cancelled, and nobody wanted that")


def _state(life: Life, found: Found, lost: int) -> Iterator[Complaint]:
    """`lost` is how many runs faults may have cost the job."""
    wish = life.wish
    if wish is None:
        yield Complaint("disagrees", life.id, "in the store, and in nobody's plan")
        return
    if found.state in ("waiting", "running"):
        yield Complaint("lost", life.id, f"still {found.state} at the end")
    gave_up = any(run.how == "dead" for run in life.runs)
    if found.state == "dead" and not gave_up and lost < TAKEOVERS:
        yield Complaint("dead", life.id, f"after {lost} runs that faults cost it: {found.error}")
    if found.state == "done" and (wish.dies or wish.gives_up):
        yield Complaint("dead", life.id, "was to die, and is done")
    if found.state == "done":
        yield from _result(life, found)


def _result(life: Life, found: Found) -> Iterator[Complaint]:
    """A job is done by its last attempt: one that had lost its lease can't settle."""
    [*by] = (run for run in life.runs if run.started.run == found.result)
    if not by or by[0].how != "done":
        yield Complaint("lost", life.id, f"done by {found.result}, which did not end so")
    elif max(by[0].attempts) < life.runs[-1].started.attempt:
        yield Complaint("disagrees", life.id, f"{_told(by[0])} settled it, not the last attempt")


def _counts(life: Life, found: Found) -> Iterator[Complaint]:
    last = max((max(run.attempts) for run in life.runs), default=0)
    if found.attempts < last:
        yield Complaint("disagrees", life.id, f"attempt {last} ran, {found.attempts} are counted")
    if (lost := len(list(_unchosen(life)))) > found.takeovers + found.releases:
        words = f"{lost} runs were lost, {found.takeovers + found.releases} are counted"
        yield Complaint("disagrees", life.id, words)
    failed = sum(run.how in ("retry", "dead") for run in life.runs)
    if found.failures > failed:
        yield Complaint("disagrees", life.id, f"{found.failures} failures are counted of {failed}")
    wish = life.wish
    if wish and found.state == "done" and found.failures != wish.fails:
        yield Complaint("disagrees", life.id, f"{found.failures} failures, not {wish.fails}")
    by_itself = found.state == "dead" and any(run.how == "dead" for run in life.runs)
    if wish and wish.dies and by_itself and found.failures != RETRIES + 1:
        yield Complaint("disagrees", life.id, f"dead after {found.failures} failures")
    if sum(line.added for line in life.stored) > 1:
        yield Complaint("disagrees", life.id, "its id was said to be free more than once")


def _told(run: Run) -> str:
    return f"attempt {run.started.attempt} (pid {run.started.pid}, {run.how})"


def by_rule(complaints: Iterable[Complaint]) -> str:
    """The complaints for people: how many by each rule, and the first few of each."""
    rules: dict[str, list[Complaint]] = defaultdict(list)
    for complaint in complaints:
        rules[complaint.rule].append(complaint)
    return "\n".join(
        f"{rule}: {len(found)}\n" + "\n".join(f"    {each.id} {each.words}" for each in found[:8])
        for rule, found in sorted(rules.items())
    )
