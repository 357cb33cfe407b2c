"""The house rules that a linter does not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tickwheel

SOURCE = Path(tickwheel.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(SOURCE.rglob("*.py"))

FUNCTION_LINES, MODULE_LINES = 70, 600
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
def test_a_module_says_what_it_is_for_and_is_not_long(module: Path) -> None:
    text = module.read_text()
    assert ast.get_docstring(ast.parse(text)), "no docstring"
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
    else:
        assert read == []


@pytest.mark.parametrize("name", [name for name in tickwheel.__all__ if name != "__version__"])
def test_every_public_name_says_what_it_is(name: str) -> None:
    # A dataclass without a docstring is given its own signature for one.
    doc = vars(tickwheel)[name].__doc__
    assert doc and not doc.startswith(f"{name}(")


def test_every_path_that_the_architecture_names_exists() -> None:
    page = ROOT / "ARCHITECTURE.md"
    if not page.exists():
        pytest.skip("there is no ARCHITECTURE.md yet")
    named = {word for word in re.findall(r"`([^`\n]+)`", page.read_text()) if PATH.match(word)}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
