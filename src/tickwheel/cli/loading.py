"""From what was typed to an app and its store: `shop:app`, `--store URL`.

Whatever is wrong with it is the user's to mend, so it is said in one line that names the place in
the user's own code.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from tickwheel.cli.output import say
from tickwheel.errors import BadConfig, StoreError, StoreUnavailable, TickwheelError

if TYPE_CHECKING:
    from tickwheel.app import App
    from tickwheel.cli.options import Where
    from tickwheel.client import Client

T = TypeVar("T")

DEFAULT_NAME = "app"


# --- An app by its name


def load_app(target: str) -> App:
    """The app that `module:app`, or `module` for its attribute `app`, stands for.

    Looks in the current folder first. Raises BadConfig.
    """
    from tickwheel.app import App

    module_name, attribute = _split(target)
    if os.getcwd() not in sys.path:
        # `python -m` does it by itself, the installed command does not.
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
            f"{module_name}:{attribute} is no tickwheel.App but of type {kind}{_apps_of(module)}"
        )
    return found


def _split(target: str) -> tuple[str, str]:
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
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not _users_frames(error):
            raise BadConfig(_not_found(error, name, target)) from error
        raise BadConfig(f"{_place(error)}: {error}") from error
    except (ImportError, TickwheelError) as error:
        raise BadConfig(f"{_place(error)}: {error}") from error
    except (Exception, SystemExit) as error:
        say(_short_traceback(error))
        words = error.msg if isinstance(error, SyntaxError) else f"{type(error).__name__}: {error}"
        raise BadConfig(f"{_place(error)}: {words}") from error


def _not_found(error: ModuleNotFoundError, name: str, target: str) -> str:
    words = f"no module named {error.name!r} in {os.getcwd()} or among the installed packages"
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


def _place(error: BaseException) -> str:
    """File and line, as short as they can be from here."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = _users_frames(error) or traceback.extract_tb(error.__traceback__)
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}"


def _short(filename: str) -> str:
    here = Path.cwd()
    path = Path(filename)
    return str(path.relative_to(here)) if path.is_relative_to(here) else filename


def _short_traceback(error: BaseException) -> str:
    """The user's own frames: how Python got to them is no news."""
    lines = traceback.format_list(_users_frames(error))
    if isinstance(error, SyntaxError):
        lines += traceback.format_exception_only(error)[:-1]
    return "".join(["Traceback (your code only):\n", *lines]).rstrip()


# --- A store


def ask(where: Where, question: Callable[[Client], Awaitable[T]]) -> T:
    """Open the store that the options name, ask it, close it. Never creates a store."""
    import asyncio

    return asyncio.run(_ask(app_of(where), question))


def app_of(where: Where) -> App:
    if where.store is not None and where.app is not None:
        raise BadConfig("give --store or --app, not both")
    if where.app is not None:
        return load_app(where.app)
    from tickwheel.app import App
    from tickwheel.config import load

    config = load()
    # An app that is named says which store is its own, unless a store was named as well.
    if where.store is None and config.settings.app and not config.chosen("store"):
        return load_app(config.settings.app)
    return App(where.store)


async def _ask(app: App, question: Callable[[Client], Awaitable[T]]) -> T:
    must_be_there(app.url)
    await open_app(app)
    try:
        return await question(await app.client())
    finally:
        await app.__aexit__()


async def open_app(app: App) -> None:
    """Open the app's store; what is wrong with it is said with its name."""
    try:
        await app.__aenter__()
    except StoreError as error:
        raise type(error)(f"{store_name(app)}: {error}") from error
    except OSError as error:
        raise StoreUnavailable(f"{store_name(app)}: {error}") from error


def must_be_there(url: str) -> None:
    """Refuse to look at a store that is not there: opening would make an empty one of it."""
    scheme, _, where = url.partition("://")
    if scheme == "memory":
        raise BadConfig("memory:// lives inside the process that made it and can't be seen here")
    if scheme == "sqlite":
        path = Path(unquote(where.partition("?")[0])[1:])
        if not path.exists():
            raise StoreUnavailable(
                f"there is no store at {path.absolute()}; a worker or the first job creates it, "
                "or name another one with --store, --app or TICKWHEEL_STORE"
            )


def store_name(app: App) -> str:
    """The store's URL, fit to be shown."""
    return without_password(app.url) or "a store of the app's own"


def without_password(url: str) -> str:
    where = urlsplit(url)
    if where.password is None:
        return url
    return where._replace(netloc=where.netloc.replace(f":{where.password}@", ":***@")).geturl()
