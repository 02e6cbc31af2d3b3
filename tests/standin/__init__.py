"""A stand-in for torch, for tests that are not about torch: importing torch costs each node two CPU seconds.

The agent starts the same processes: the worker store serves MASTER_ADDR:MASTER_PORT on the socket that it was given,
and ranks meet over it. A rank whose peer is gone raises, and one whose peer is silent waits.
"""

from __future__ import annotations

from pathlib import Path

# The PYTHONPATH for elaunch's environment.
WITHOUT_TORCH = {"PYTHONPATH": str(Path(__file__).with_name("path"))}
# For a job with torch itself, in a module whose other jobs are without.
WITH_TORCH = {"PYTHONPATH": ""}
