"""Load the app and open the store that a command names: `shop:app`, `--store URL`.

Only the user can fix what is wrong with them, so an error is one line that names the place in the
user's code.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

from tickwheel.cli.output import say
from tickwheel.errors import BadConfig, StoreError, StoreUnavailable, TickwheelError
from tickwheel.masking import masked, scrubbed

if TYPE_CHECKING:
    from tickwheel.app import App
    from tickwheel.cli.options import Where
    from tickwheel.client import Client

T = TypeVar("T")

DEFAULT_NAME = "app"


# --- An app by its name


def load_app(target: str, imports: Iterable[str] = ()) -> App:
    """Load the app named by `module:app`, or by `module` for its attribute `app`, and import the
    modules that it names, and these: they may have more of its tasks.

    Looks in the current folder first. Raises BadConfig.
    """
    from tickwheel.app import App

    module_name, attribute = _split(target)
    if os.getcwd() not in sys.path:
        # `python -m` does this by itself; the installed command does not.
        sys.path.insert(0, os.getcwd())
    module = _imported(module_name, target)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadConfig(f"{module_name} has no {attribute!r}{_apps_of(module)}")
        found = getattr(found, part)
    if not isinstance(found, App):
        kind = type(found).__name__
        raise BadConfig(
            f"{module_name}:{attribute} is of type {kind}, not a tickwheel.App{_apps_of(module)}"
        )
    _trying(found.import_tasks, module_name, target)
    for name in imports:
        if ":" in name:
            raise BadConfig(f"{name!r} is an app; --import takes a module, as in shop.mail")
        _imported(_split(name)[0], f"{name}:")
    return found


def _split(target: str) -> tuple[str, str]:
    if (shown := scrubbed(target)) != target:
        raise BadConfig(f"{shown!r} is a URL, not an app; write module:app, as in shop:app")
    module, _, attribute = target.partition(":")
    attribute = attribute or DEFAULT_NAME
    if module.endswith(".py") or "/" in module or os.sep in module:
        dotted = module.removesuffix(".py").strip("./").replace(os.sep, ".").replace("/", ".")
        raise BadConfig(f"{target!r} is a path; name the module: {dotted}:{attribute}")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise BadConfig(f"{target!r} does not name an app; write module:app, as in shop:app")
    return module, attribute


def _apps_of(module: ModuleType) -> str:
    from tickwheel.app import App

    names = [name for name, value in vars(module).items() if isinstance(value, App)]
    return f"; it has {', '.join(f'{module.__name__}:{name}' for name in names)}" if names else ""


def _imported(name: str, target: str) -> ModuleType:
    return _trying(lambda: importlib.import_module(name), name, target)


def _trying(step: Callable[[], T], name: str, target: str) -> T:
    """Take a step of importing `name`; what it raises is told in one line."""
    try:
        return step()
    except ModuleNotFoundError as error:
        if not _users_frames(error):
            raise BadConfig(_not_found(error, name, target)) from error
        raise BadConfig(f"{_location(error)}: {error}") from error
    except (ImportError, TickwheelError) as error:
        raise BadConfig(f"{_location(error)}: {error}") from error
    except (Exception, SystemExit) as error:
        say(_short_traceback(error))
        words = error.msg if isinstance(error, SyntaxError) else f"{type(error).__name__}: {error}"
        raise BadConfig(f"{_location(error)}: {scrubbed(words)}") from error


def _not_found(error: ModuleNotFoundError, name: str, target: str) -> str:
    words = f"no module named {error.name!r} in {os.getcwd()} or the installed packages"
    before, _, last = name.rpartition(".")
    return f"{words}; did you mean {before}:{last}?" if before and ":" not in target else words


# --- Where in the user's code something went wrong


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if _is_users(frame.filename)]


def _is_users(filename: str) -> bool:
    path = Path(filename)
    if not path.is_absolute() or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    ours = Path(__file__).parents[1]
    return not any(path.is_relative_to(other) for other in (ours, sysconfig.get_path("stdlib")))


def _location(error: BaseException) -> str:
    """File and line, relative to the current folder if possible."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = _users_frames(error) or traceback.extract_tb(error.__traceback__)
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}"


def _short(filename: str) -> str:
    here = Path.cwd()
    path = Path(filename)
    return str(path.relative_to(here)) if path.is_relative_to(here) else filename


def _short_traceback(error: BaseException) -> str:
    """The user's own frames, without Python's import machinery."""
    lines = traceback.format_list(_users_frames(error))
    if isinstance(error, SyntaxError):
        lines += traceback.format_exception_only(error)[:-1]
    return "".join(["Traceback (your code only):\n", *lines]).rstrip()


# --- A store


def ask(where: Where, question: Callable[[Client], Awaitable[T]]) -> T:
    """Open the store that the options name, ask it, close it. Never creates a store."""
    app = app_of(where)
    must_be_there(app.url)
    return ask_app(app, question)


def ask_app(app: App, question: Callable[[Client], Awaitable[T]]) -> T:
    """The same for an app whose store may be new."""
    import asyncio

    return asyncio.run(_ask(app, question))


def load_quietly(name: str) -> App:
    """Load an app for a command whose stdout is only for its output: what the user's modules print
    goes to stderr. A worker's stdout is theirs."""
    with contextlib.redirect_stdout(sys.stderr):
        return load_app(name)


def app_of(where: Where) -> App:
    if where.store is not None and where.app is not None:
        raise BadConfig("use --store or --app, not both")
    if where.app is not None:
        return load_quietly(where.app)
    from tickwheel.app import App
    from tickwheel.config import load

    config = load()
    # A named app uses its own store, unless a store is named as well.
    if where.store is None and config.settings.app and not config.chosen("store"):
        return load_quietly(config.settings.app)
    return App(where.store)


def named_app(name: str | None) -> App:
    """The app of this name, or that of the settings, for a command that needs its tasks."""
    from tickwheel.config import load

    name = name or load().settings.app
    if not name:
        raise BadConfig("which app? Name it, as in shop:app, or set `app`: see tickwheel config")
    return load_quietly(name)


async def _ask(app: App, question: Callable[[Client], Awaitable[T]]) -> T:
    from tickwheel.cli.auditing import audited

    async with audited(app, open_app) as client:
        return await question(client)


async def open_app(app: App) -> None:
    """Open the app's store; an error names the store."""
    try:
        await app.__aenter__()
    except StoreError as error:
        name = store_name(app)
        # Some errors name their server already.
        words = str(error) if str(error).startswith(name) else f"{name}: {error}"
        raise type(error)(words) from error
    except OSError as error:
        raise StoreUnavailable(f"{store_name(app)}: {error}") from error


def must_be_there(url: str) -> None:
    """Refuse a store that does not exist: opening it would create an empty one."""
    scheme, _, where = url.partition("://")
    refuse_memory(url)
    if scheme == "sqlite":
        path = Path(unquote(where.partition("?")[0])[1:])
        if not path.exists():
            raise StoreUnavailable(
                f"there is no store at {path.absolute()}; a worker or the first job creates it, "
                "or name another store with --store, --app or TICKWHEEL_STORE"
            )
        from tickwheel.stores.sqlite.file import has_store

        if not has_store(path):
            raise StoreUnavailable(
                f"there is no store in {path.absolute()}; a worker or the first job creates it, "
                "or name another store with --store, --app or TICKWHEEL_STORE"
            )


def refuse_memory(url: str) -> None:
    if url.startswith("memory://"):
        raise BadConfig("a memory:// store exists only in the process that opened it")


def store_name(app: App) -> str:
    """The store's URL without its password."""
    return masked(app.url) or "the app's own store"
