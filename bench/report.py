"""How every benchmark reports: rows with a goal, a table for people, JSON for machines."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass
class Row:
    """One figure. Machines differ, so the ratio to a baseline of the same run says more."""

    what: str
    figure: float
    unit: str
    baseline: str = ""
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None


@dataclass
class Report:
    title: str
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)

    @property
    def met(self) -> bool:
        return all(row.met is not False for row in self.rows)

    def show(self) -> None:
        table = Table(title=self.title, title_justify="left", header_style="bold")
        table.add_column("what")
        for name in ("figure", "ratio"):
            table.add_column(name, justify="right")
        table.add_column("to")
        table.add_column("goal")
        for row in self.rows:
            mark = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[row.met]
            table.add_row(
                row.what,
                f"{row.figure:,.{0 if row.figure >= 100 else 2}f} {row.unit}",
                "" if row.ratio is None else f"{row.ratio:.2f}x",
                row.baseline,
                f"{row.goal} {mark}".strip(),
            )
        Console(width=None if os.isatty(1) else 120).print(table)

    def save(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        machine = {
            "python": platform.python_version(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
        }
        document = {"title": self.title, "machine": machine, "rows": [asdict(r) for r in self.rows]}
        (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
