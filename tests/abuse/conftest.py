"""Lets the abuse suite share its modules, whatever the import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
