"""The dashboard's pages and the files they need. They hold no data, so they need no key."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tickwheel.app import App
from tickwheel.http.asgi import asgi_app

STATIC = Path(__file__).parent / "static"
PAGE = "index.html"
# Where a screen can be reached; the scripts know which one to draw.
SCREENS = (
    *("/", "/jobs", "/job", "/dead", "/schedules", "/schedule", "/queues", "/workers"),
    *("/store", "/audit", "/sign-in"),
)
# Files of other kinds are not served.
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Nothing inline, nothing from elsewhere, in no frame.
POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:"),
        *("connect-src 'self'", "base-uri 'self'", "form-action 'self'", "frame-ancestors 'none'"),
    )
)
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# Another version has other addresses.
FILE_HEADERS = {
    "Cache-Control": "public, max-age=31536000, immutable",
    "X-Content-Type-Options": "nosniff",
}


def dashboard_app(
    app: App,
    *,
    allow_hosts: Sequence[str] = (),
    redact: Sequence[str] | None = None,
    takes_any_task: bool = False,
) -> ASGIApp:
    """The pages and the HTTP API of an app, which can be served alone or mounted in another app."""
    return asgi_app(
        app,
        allow_hosts=allow_hosts,
        redact=redact,
        takes_any_task=takes_any_task,
        pages=_routes(_content()),
    )


# --- What there is


@dataclass(frozen=True, slots=True)
class Content:
    """The page, and all files by their names; the version is that of all of them."""

    page: str
    files: Mapping[str, bytes]
    version: str


@lru_cache(maxsize=1)
def _content() -> Content:
    files = {
        path.relative_to(STATIC).as_posix(): path.read_bytes()
        for path in sorted(STATIC.rglob("*"))
        if path.suffix in TYPES
    }
    page = (STATIC / PAGE).read_text(encoding="utf-8")
    seen = hashlib.sha256(page.encode())
    for name, content in files.items():
        seen.update(f"\0{name}\0{len(content)}\0".encode())
        seen.update(content)
    return Content(page, files, seen.hexdigest()[:16])


def page_text(content: Content, root: str) -> str:
    """The page of a dashboard below this path."""
    base = escape(quote(root.rstrip("/"), safe="/%:@!$&'()*+,;=~"))
    return content.page.replace("{{root}}", base).replace("{{version}}", content.version)


# --- Routes


def _routes(content: Content) -> list[Route]:
    async def page(request: Request) -> Response:
        text = page_text(content, request.scope.get("root_path", ""))
        return Response(text, 200, PAGE_HEADERS, media_type="text/html")

    async def file(request: Request) -> Response:
        # By name, among those that were read at the start: no path leads elsewhere.
        name = request.path_params["name"]
        if request.path_params["version"] != content.version or name not in content.files:
            raise HTTPException(404)
        kind = TYPES[Path(name).suffix]
        return Response(content.files[name], 200, {**FILE_HEADERS, "Content-Type": kind})

    screens = [Route(path, page, methods=["GET"]) for path in SCREENS]
    return [*screens, Route("/static/{version}/{name:path}", file, methods=["GET"])]
