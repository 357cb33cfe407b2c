"""The order that cancels itself: unpaid orders are cancelled at their deadline, to the millisecond.

    python examples/orders.py

Thirty orders are placed over a few seconds, each with a deadline. Some are paid in time, and their
cancel job is cancelled. In the middle the worker is killed with `kill -9` and another one started.
At the end every unpaid order has been cancelled, and nothing that was paid.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tickwheel import App, JobHandle, State

# The worker processes that main() starts import this module too, and find the store here.
STORE = os.environ.setdefault("TICKWHEEL_STORE", f"sqlite:///{tempfile.mkdtemp()}/jobs.db")

app = App(STORE)
console = Console()

ORDERS, DEADLINE_S = 30, 5


@app.task
async def cancel_order(order_id: int) -> str:
    """A shop would set the order's state and put its items back into stock."""
    return f"order {order_id} cancelled"


async def main() -> None:
    worker = start_worker()
    deadlines: dict[int, JobHandle[str]] = {}
    paid: list[int] = []
    try:
        for order_id in range(1, ORDERS + 1):
            deadlines[order_id] = await cancel_order.using(
                delay=DEADLINE_S, id=f"cancel-order-{order_id}"
            ).enqueue(order_id)
            await asyncio.sleep(0.2)
            if random.random() < 0.4:
                paid.append(order_id)
                answer = await deadlines[order_id].cancel()
                console.print(f"order {order_id:2} placed, paid: its deadline is {answer}")
            else:
                console.print(f"order {order_id:2} placed, to be paid within {DEADLINE_S} s")
            if order_id == 2 * ORDERS // 3:
                worker.kill()
                worker.wait()
                console.print("[red bold]the worker was killed with kill -9[/], another one starts")
                worker = start_worker()
        console.print("all orders placed; waiting for the last deadline")
        await summary(deadlines, paid)
    finally:
        worker.terminate()
        worker.wait()


async def summary(deadlines: dict[int, JobHandle[str]], paid: list[int]) -> None:
    late_ms, wrong = [], 0
    for order_id, job in deadlines.items():
        if order_id in paid:
            wrong += (await job.info()).state is not State.CANCELLED
            continue
        await job.result(timeout=30)
        last = (await job.info()).history[-1]
        assert last.started_ms is not None
        late_ms.append(last.started_ms - last.due_ms)
    on_time = sum(ms <= 20 for ms in late_ms)
    console.rule("summary")
    console.print(f"{ORDERS} orders, {len(paid)} paid in time, {len(late_ms)} cancelled")
    console.print(f"[green]none lost[/], {wrong} paid orders cancelled by mistake")
    console.print(f"{on_time} of {len(late_ms)} started within 20 ms of their deadline")
    if on_time < len(late_ms):
        console.print(f"the others were in the dead worker's hand: {max(late_ms)} ms at most")
    if wrong:
        raise SystemExit("a paid order was cancelled")


def start_worker() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tickwheel", "worker", "orders:app", "--lease", "2s"]
    return subprocess.Popen(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    asyncio.run(main())
