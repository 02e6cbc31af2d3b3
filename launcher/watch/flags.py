"""The options of `elaunch status`, `top`, `stacks`, `stop` and `restart`: for the command line and its completion."""

from __future__ import annotations

_JSON = ("--json", "one JSON object, for scripts")
_RANKS = ("--ranks", "a line for each rank, however many there are")
# Each command with its switches and their help.
WATCHES: dict[str, tuple[tuple[str, str], ...]] = {
    "status": (_JSON, _RANKS), "top": (_RANKS,), "stacks": (_JSON,), "stop": (), "restart": ()
}  # fmt: skip
# Of elaunch's options those that say where a job's store is, and which job.
STORE_OPTIONS = ("rdzv-endpoint", "rdzv-backend", "rdzv-conf", "run-id", "token-file", "config", "master-addr")
