"""The options of `elaunch status`, `top` and `stacks`: for the command line, its help and completion."""

from __future__ import annotations

_JSON = ("--json", "one JSON object (docs/observe.md has its schema)")
_RANKS = ("--ranks", "a line for each rank, however many there are")
# Each command with its switches and their help.
WATCHES = {"status": (_JSON, _RANKS), "top": (_RANKS,), "stacks": (_JSON,)}
# Of elaunch's options those that say where a job's store is, and which job.
STORE_OPTIONS = ("rdzv-endpoint", "rdzv-backend", "rdzv-conf", "run-id", "token-file", "config", "master-addr")
