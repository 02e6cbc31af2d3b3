"""A stand-in for torch, for tests that are not about torch: importing torch costs each node two CPU seconds.

The agent starts the same processes: the worker store serves MASTER_ADDR:MASTER_PORT on the socket that it was given,
and ranks meet over it. A rank whose peer is gone raises, and one whose peer is silent waits.
"""

from __future__ import annotations

import shutil
from pathlib import Path

# The PYTHONPATH for elaunch's environment.
WITHOUT_TORCH = {"PYTHONPATH": str(Path(__file__).with_name("path"))}
# For a job with torch itself, in a module whose other jobs are without.
WITH_TORCH = {"PYTHONPATH": ""}

# What a fork server asks of torch.
_ASKED = """
from types import SimpleNamespace
cuda = SimpleNamespace(is_initialized=lambda: False)
default_generator = SimpleNamespace(seed=lambda: 0)
get_num_threads = lambda: 1
"""
# Notes who imports it.
_DYNAMO = 'import os\nBY = os.getpid()\nopen(f"dynamo.{BY}", "w").close()\n'


def with_dynamo(lib: Path) -> None:
    """Make in `lib` a stand-in that a fork server can import as its default."""
    shutil.copytree(WITHOUT_TORCH["PYTHONPATH"], lib, dirs_exist_ok=True)
    with (lib / "torch" / "__init__.py").open("a") as package:
        package.write(_ASKED)
    (lib / "torch" / "_dynamo.py").write_text(_DYNAMO)
