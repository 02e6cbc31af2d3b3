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
    "rehearse": "what does a failure cost a script, and does it change the result?",
    "report": "make a page that shows what happened in a run",
}

# The switches of `elaunch warm`, and their help.
WARM_FLAGS = (
    ("--status", "show this user's fork servers: pid, since when, what is imported, memory, minutes left, and where"),
    ("--json", "with --status: as a JSON list"),
    ("--stop", "end these fork servers; running jobs go on"),
)

# The options of `elaunch rehearse`, their values, and their help.
REHEARSE_FLAGS = (
    ("--steps", "N", "end each run after this step of a Keeper [40]"),
    ("--link", "PATH", "a link to this file or folder is in the run's folder, for a script that reads it there"),
)
