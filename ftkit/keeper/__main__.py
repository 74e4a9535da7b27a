"""`python -m ftkit.keeper`: the side process of a replica group; group rank 0 starts it."""

from __future__ import annotations

import sys

from ftkit.keeper.server import main

if __name__ == "__main__":
    sys.exit(main())
