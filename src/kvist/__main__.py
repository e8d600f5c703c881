"""``python -m kvist``."""

import sys

from kvist.cli import main

if __name__ == "__main__":
    sys.exit(main())
