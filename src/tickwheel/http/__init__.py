"""The HTTP API: jobs, schedules, queues and workers for programs in any language."""

from __future__ import annotations

from importlib.util import find_spec

from tickwheel.errors import BadConfig

if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
    raise BadConfig("the HTTP API needs the extra `http`: pip install 'tickwheel[http]'")
