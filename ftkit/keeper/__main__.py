"""`python -m ftkit.keeper`: the side process of a replica group; group rank 0 starts it."""

from __future__ import annotations

import logging
import os
import sys

from ftkit.keeper.server import main

if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        logging.getLogger(__name__).exception("the keeper ends")
        code = 1
    logging.shutdown()
    sys.stderr.flush()
    # Everything is closed. The interpreter's own end may wait for ever for a lock of gRPC's, whose thread it
    # has ended itself.
    os._exit(code)
