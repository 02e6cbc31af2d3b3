"""The words that are commands of elaunch where they come first, and what each does in a few words. Pure."""

from __future__ import annotations

COMMANDS = {
    "doctor": "can this node train, with the options of a job?",
    "run": "start a job; may be left out",
    "store": "serve a store for jobs of several nodes",
    "submit": "hand a job to a scheduler",
    "status": "show how a running job is doing",
    "top": "show a running job, refreshed each second",
    "stacks": "show where every rank of a running job is",
    "stop": "end a running job on all nodes, as Ctrl-C does",
    "restart": "start the workers of a running job again",
    "warm": "show or end what stays for the next start",
    "report": "make a page that shows what happened in a run",
}

# The switches of `elaunch warm`, and their help.
WARM_FLAGS = (
    ("--status", "show this user's fork servers: pid, since when, what is imported, memory, minutes left, and where"),
    ("--json", "with --status: as a JSON list"),
    ("--stop", "end these fork servers; running jobs go on"),
)
