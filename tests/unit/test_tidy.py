"""The house rules that a linter does not know."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tickwheel
from tickwheel import App
from tickwheel.batch import Batcher
from tickwheel.stores.memory import MemoryStore

SOURCE = Path(tickwheel.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(SOURCE.rglob("*.py"))

FUNCTION_LINES, MODULE_LINES, SUMMARY_CHARACTERS = 70, 600, 100
# Packages whose modules ARCHITECTURE.md does not list one by one.
FACES = ("bench", "cli", "dashboard", "django", "http", "testing", "examples")
# Runs in environments without Tickwheel, so it can't ask its clock.
ELSEWHERE = SOURCE / "bench" / "programs"
# Ways to read the time or to wait for it, by the last two parts of their names.
TIME = re.compile(
    r"^(time\.(sleep|(time|monotonic|perf_counter|process_time|clock_gettime)(_ns)?)"
    r"|(datetime|date)\.(now|utcnow|today))$"
)
# What looks like a path of this repository: a folder of it and more, or a file at the top.
PATH = re.compile(r"^((src|tests|bench|docs|examples|\.ci)/[\w./-]*|[\w-]+\.(md|toml|txt))$")

each_module = pytest.mark.parametrize(
    "module", MODULES, ids=[str(path.relative_to(SOURCE)) for path in MODULES]
)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def times_read(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        if isinstance(node, ast.Attribute):
            names = [".".join(ast.unparse(node).split(".")[-2:])]
        yield from filter(TIME.match, names)


@each_module
def test_a_module_says_in_its_first_line_what_it_hides_and_is_not_long(module: Path) -> None:
    text = module.read_text()
    summary, *rest = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    assert summary.endswith(".") and len(summary) <= SUMMARY_CHARACTERS, summary
    assert not rest or not rest[0], "the summary continues on the next line"
    assert len(text.splitlines()) <= MODULE_LINES


@each_module
def test_no_function_is_long(module: Path) -> None:
    tree = ast.parse(module.read_text())
    lines = {each.name: (each.end_lineno or 0) - each.lineno + 1 for each in functions(tree)}
    assert {name: count for name, count in lines.items() if count > FUNCTION_LINES} == {}


@each_module
def test_nothing_is_left_to_do(module: Path) -> None:
    assert re.findall(r"\b(TODO|FIXME|XXX|HACK)\b", module.read_text()) == []


@each_module
def test_only_the_clock_reads_the_time(module: Path) -> None:
    read = list(times_read(ast.parse(module.read_text())))
    if module == SOURCE / "clock.py":
        assert read, "this test has gone blind"
    elif ELSEWHERE not in module.parents:
        assert read == []


@pytest.mark.parametrize("name", [name for name in tickwheel.__all__ if name != "__version__"])
def test_every_public_name_says_what_it_is(name: str) -> None:
    # A dataclass without a docstring is given its own signature for one.
    doc = getattr(tickwheel, name).__doc__
    assert doc and not doc.startswith(f"{name}(")


async def test_from_enqueue_to_the_batch_it_is_three_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CONTRIBUTING.md says."""
    calls: list[str] = []

    async def send(self: Batcher[Any, Any], item: Any) -> bool:
        frame = inspect.currentframe()
        while (frame := frame and frame.f_back) and SOURCE in Path(
            frame.f_code.co_filename
        ).parents:
            calls.append(frame.f_code.co_qualname)
        return True

    app = App(MemoryStore())

    @app.task
    def nothing() -> None: ...

    async with app:
        monkeypatch.setattr(Batcher, "send", send)
        await nothing.enqueue()
    assert calls == ["Client.add", "Call.enqueue"]


def test_each_class_name_means_one_thing() -> None:
    """Stores are read one at a time: two of them may use one name, each for its own."""
    found: dict[str, list[str]] = {}
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef) and not module.is_relative_to(SOURCE / "stores"):
                found.setdefault(node.name.lstrip("_"), []).append(str(module))
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def architecture() -> str:
    return (ROOT / "ARCHITECTURE.md").read_text()


def in_code(text: str) -> set[str]:
    """The words that are written as code."""
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_path_that_the_architecture_names_exists() -> None:
    named = set(filter(PATH.match, in_code(architecture())))
    assert named
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_the_map_names_every_module() -> None:
    """At the top by its path, in a package by its name; packages of faces as a whole."""
    [_, page] = architecture().split("\n## The map\n")
    named = in_code(page.partition("\n## ")[0])
    # `schema.sql` is next to `schema.py`, which needs no name of its own.
    known = {re.sub(r"\.\w+$", "", word.rpartition("/")[2]) for word in named}
    for module in MODULES:
        inside = module.relative_to(SOURCE)
        if len(inside.parts) == 1:
            assert f"src/tickwheel/{inside}" in named
        elif module.name == "__init__.py":
            assert module.parent.name in known, inside
        elif inside.parts[0] not in FACES:
            assert module.stem in known, inside
