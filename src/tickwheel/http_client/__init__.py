"""Clients of the HTTP API, for programs without access to the store.

One set of verbs, written once, over a pure core: `requests` says what to ask and `answers` what it
means; `exchange` repeats what may be repeated; `wire` has the connections.
"""

from tickwheel.http_client.answers import BulkOutcome, RemoteSchedule, RemoteWorker
from tickwheel.http_client.async_client import AsyncHttpClient
from tickwheel.http_client.handles import AsyncHttpJobHandle
from tickwheel.http_client.requests import HttpJob
from tickwheel.http_client.sync_client import HttpClient, HttpJobHandle

__all__ = [
    "AsyncHttpClient",
    "AsyncHttpJobHandle",
    "BulkOutcome",
    "HttpClient",
    "HttpJob",
    "HttpJobHandle",
    "RemoteSchedule",
    "RemoteWorker",
]
