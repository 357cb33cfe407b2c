"""`python -m tickwheel` is `tickwheel`."""

import sys

from tickwheel.cli import main

if __name__ == "__main__":
    sys.exit(main())
