"""A stand-in for torch, for jobs in which torch is not what a test is about: its import costs a node two CPU seconds.

The agent starts the same processes: the worker store serves MASTER_ADDR:MASTER_PORT on the socket that it was given,
and ranks meet over it. A rank whose peer is gone raises, and one whose peer is silent waits.
"""

from __future__ import annotations

from pathlib import Path

# For the environment of elaunch.
WITHOUT_TORCH = {"PYTHONPATH": str(Path(__file__).with_name("path"))}
