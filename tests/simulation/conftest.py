"""Make the simulation importable as `simulation`, here and in worker processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
