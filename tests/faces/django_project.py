"""A Django project in a folder, and its commands in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker_process import environment

from postgres_server import PostgresServer

SETTINGS = """
from pathlib import Path

BASE_DIR = Path(__file__).parent.parent
SECRET_KEY = "secret"
USE_TZ = True
INSTALLED_APPS = ["tickwheel.django", "shop", "mail", {apps}]
DATABASES = {{"default": {database!r}}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TICKWHEEL = {tickwheel!r}
TASKS = {{"default": {{"BACKEND": "tickwheel.django.backend.TickwheelBackend", {options}}}}}
"""

MANAGE = """
import os, sys

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    from django.core.management import execute_from_command_line
    execute_from_command_line(sys.argv)
"""

MODELS = """
from django.db import models

class Order(models.Model):
    state = models.CharField(max_length=20)
"""

TASKS = """
import os

from django.db import connection
from shop.models import Order
from tickwheel.django import app

@app.task
def pay(order_id: int) -> str:
    Order.objects.filter(id=order_id).update(state="paid")
    return "thread"

@app.task
async def ship(order_id: int) -> str:
    await Order.objects.filter(id=order_id).aupdate(state="shipped")
    return "async"

@app.task(pool="process")
def report(order_id: int) -> int:
    assert Order.objects.filter(id=order_id).exists()
    return os.getpid()

@app.task(retries=0)
def slow(n: int) -> None:
    Order.objects.create(state=str(n))
    with connection.cursor() as cursor:
        cursor.execute("select pg_sleep(0.3)")
"""

MAIL = """
from tickwheel.django import app

@app.task
def send(order_id: int) -> str:
    return f"sent {order_id}"
"""


class Project:
    """The project, its database and its settings."""

    def __init__(
        self,
        folder: Path,
        database: dict[str, Any],
        tickwheel: dict[str, Any],
        *,
        apps: str = "",
        options: str = "",
    ) -> None:
        self.folder = folder
        files = {
            "manage.py": MANAGE,
            "project/__init__.py": "",
            "project/settings.py": SETTINGS.format(
                database=database, tickwheel=tickwheel, apps=apps, options=options
            ),
            "shop/__init__.py": "",
            "shop/models.py": MODELS,
            "shop/tasks.py": TASKS,
            "mail/__init__.py": "",
            "mail/tasks.py": MAIL,
        }
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    @property
    def environment(self) -> dict[str, str]:
        paths = os.pathsep.join(each for each in sys.path if each)
        return {
            **environment(),
            "PYTHONPATH": paths,
            "DJANGO_SETTINGS_MODULE": "project.settings",
            # A Django test of its own would otherwise inherit the one that runs us.
            "PYTHONWARNINGS": "default",
        }

    def manage(self, *words: str) -> str:
        return self._run("manage.py", *words)

    def script(self, code: str) -> str:
        """Run this code in the project; what it prints."""
        return self._run("-c", f"import django\ndjango.setup()\n{code}")

    def fails(self, *words: str) -> str:
        """The last line of what a command says that must fail."""
        ended = self._ended("manage.py", *words)
        assert ended.returncode, ended.stdout
        return ended.stderr.strip().splitlines()[-1]

    def _run(self, *words: str) -> str:
        ended = self._ended(*words)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.strip()

    def _ended(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=100,
        )

    def worker(self, *options: str) -> Worker:
        return Worker(self, "manage.py", "tickwheel_worker", *options)


class Worker:
    """`manage.py tickwheel_worker` until the block ends."""

    def __init__(self, project: Project, *words: str) -> None:
        self._log = project.folder / f"worker-{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=project.folder,
                env=project.environment,
                stdout=log,
                stderr=log,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            assert self.process.wait(30) == 0, self.said
        finally:
            self.process.kill()


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
    return found


def sqlite_database(folder: Path) -> dict[str, Any]:
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "db.sqlite3")}


def postgres_database(server: PostgresServer, name: str) -> dict[str, Any]:
    """A new database on this server."""
    server.execute(f"create database {name}")
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": "postgres",
        "HOST": "127.0.0.1",
        "PORT": server.port,
    }
