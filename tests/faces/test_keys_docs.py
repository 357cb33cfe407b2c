"""docs/keys.md is true: its code and its commands run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from command_line import Cli, cli

__all__ = ["cli"]

PAGE = (Path(__file__).parents[2] / "docs" / "keys.md").read_text()


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)


def test_the_commands_of_the_page_run(cli: Cli) -> None:
    [commands] = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in commands.splitlines()]
    assert len(lines) == 4
    outs: list[str] = []
    for program, *argv in lines:
        assert program == "tickwheel"
        said = cli(*(outs[0].strip() if each == "ID" else each for each in argv))
        assert said.code == 0, said.err
        outs.append(said.out)
    assert "keys revoke" in outs[-1] and "keys create" in outs[-1]
