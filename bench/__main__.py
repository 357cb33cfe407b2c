"""All benchmarks, one after the other: `python -m bench [--quick]`. Exits 1 if a goal is missed."""

from __future__ import annotations

import argparse
import functools

from bench import store, wheel
from bench.kinds import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller numbers, for a first look")
    quick = parser.parse_args().quick
    met = True
    stores = {f"store-{kind}": functools.partial(store.run, kind) for kind in KINDS}
    for name, run in ({"wheel": wheel.run} | stores).items():
        report = run(quick=quick)
        report.show()
        report.save(store.RESULTS, name)
        met &= report.met
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
