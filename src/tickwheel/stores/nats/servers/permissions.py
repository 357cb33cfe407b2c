"""Who may do what on a NATS server: the subjects that each role may publish and subscribe to."""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.stores.nats.steps import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A kind of user: what it is for, and what it may publish and subscribe to."""

    about: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


# To open the store: the stream's settings, and a proof that the server has what the store needs.
_OPEN = ("$JS.API.INFO", "$JS.API.STREAM.INFO.{stream}", "{prefix}.p.*.*.*")
# To browse jobs: single jobs, pages and counts.
_BROWSE = (
    "$JS.API.STREAM.MSG.GET.{stream}",
    "$JS.API.DIRECT.GET.{stream}",
    "$JS.API.CONSUMER.INFO.{stream}.*",
    "$JS.API.CONSUMER.LIST.{stream}",
)
# To add: waiting and ready jobs, the consumers of a new queue, and the room that is kept for when
# the store is full.
_ADD = (
    "{prefix}.t.s.*.*",
    "{prefix}.r.*.*.*",
    "{prefix}.z.*",
    "$JS.API.CONSUMER.CREATE.{stream}.*",
)
# To cancel: cancelled jobs, cancel requests, and a notification of their workers; with the same
# subject, workers tell one another of parked jobs and that the store is full.
_CANCEL = (
    "{prefix}.t.c.*.*",
    "{prefix}.t.j.*.*",
    "{prefix}.t.k.*.*",
    "tw-news.{namespace}.asked.*",
)
# To work: jobs in every state, the notes of where parked ones are, schedules, records and the notes
# of their groups, workers, rate limits; to pull ready messages and acknowledge them, to prune, and
# to move consumers away from a server that is behind.
_WORK = (
    "$JS.API.STREAM.PURGE.{stream}",
    "{prefix}.t.*.*.*",
    "{prefix}.k.*",
    "{prefix}.n.*.*",
    "{prefix}.g.*.*",
    "{prefix}.w.*",
    "{prefix}.b.*",
    "$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
    "$JS.API.CONSUMER.LEADER.STEPDOWN.{stream}.*",
    "$JS.ACK.{stream}.>",
    "$JS.ACK.*.*.{stream}.>",
)
# Each user has its own inbox for answers: no user can read those of others.
_SUBSCRIBE = ("_INBOX_{user}.>", "tw-news.{namespace}.>")

# `stream` stands for each stream of the namespace, `prefix` for the start of the subjects in it;
# `steps` lists the subjects.
ROLES = {
    "producer": Role(
        about="adds, cancels and browses jobs",
        publish=(*_OPEN, *_BROWSE, *_ADD, *_CANCEL),
        subscribe=_SUBSCRIBE,
    ),
    "worker": Role(
        about="the same, and runs jobs and fires schedules",
        publish=(*_OPEN, *_BROWSE, *_ADD, *_CANCEL, *_WORK),
        subscribe=_SUBSCRIBE,
    ),
    "operator": Role(
        about="creates and updates streams, pauses queues, prunes: open the store with it once",
        publish=("tw.{namespace}.>", "tw-news.{namespace}.>", "$JS.API.>", "$JS.ACK.>"),
        subscribe=_SUBSCRIBE,
    ),
}


def subjects_of(templates: tuple[str, ...], user: str, namespace: str, shards: int) -> list[str]:
    """The subjects that these templates stand for, each once."""
    layouts = [Layout(namespace, shard, 0) for shard in range(shards)]
    found = [
        each.format(user=user, stream=layout.stream, prefix=layout.prefix, namespace=namespace)
        for each in templates
        for layout in layouts
    ]
    return list(dict.fromkeys(found))
