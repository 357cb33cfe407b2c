"""docs/django.md is true: its code runs, in a project of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django_project import Project

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "django.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# ([\w/]+\.py)\n(.*?)```", PAGE, re.DOTALL))
PAGE_MODELS = """
from django.db import models

class Order(models.Model):
    state = models.CharField(max_length=20, default="new")
    paid = models.BooleanField(default=False)
    reminded = models.BooleanField(default=False)
"""


def test_every_example_of_the_page_runs(tmp_path: Path) -> None:
    assert len(BLOCKS) == PAGE.count("```python")
    project = Project(tmp_path, {}, {})
    for name, text in {**BLOCKS, "shop/models.py": PAGE_MODELS}.items():
        (tmp_path / name).write_text(text)
    project.manage("migrate", "--run-syncdb", "-v0")
    project._run("-m", "tickwheel", "outbox", "--once", "tickwheel.django:app")
    project.script("import project.tasks_settings")
    with project.worker():
        said = project.script(
            "import time\n"
            "from shop.models import Order\n"
            "from shop.orders import place_order\n"
            "id = place_order().id\n"
            "for _ in range(600):\n"
            "    if Order.objects.get(id=id).reminded: print('reminded'); break\n"
            "    time.sleep(0.1)\n"
        )
    assert said == "reminded"
    project.manage("test", "shop", "--noinput")
