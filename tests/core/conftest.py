"""Make the twins and builders of these tests importable as `twin`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
