"""The text of `elaunch --help`, made from the table of options."""

from __future__ import annotations

from elaunch.launcher.options.command_line import Group, Option
from elaunch.launcher.options.rdzv_conf import SETTINGS
from elaunch.launcher.options.table import TABLE

_COLUMN = 37

_HEAD = """\
Usage: elaunch [options] script.py args…
       elaunch [options] -m module args…
       elaunch [options] --no-python command args…
       elaunch store [--listen HOST:PORT] [--token-file FILE]
       elaunch submit slurm|k8s [--dry-run] … script.py args…
       elaunch doctor [--json] [options]
       elaunch status|top|stacks [JOB]
       elaunch stop|restart JOB
       elaunch warm [--stop]
       elaunch rehearse [--steps N] [--link PATH] [options] script.py args…
       elaunch report [-o FILE] [--json] DIR

Start a PyTorch training job, one worker per GPU, and restart it when a worker fails.

Examples:
  elaunch train.py --lr 0.1                           one worker per GPU, up to 3 restarts
  elaunch --nproc-per-node 4 --log-dir logs train.py  4 workers, output on the console and in logs
  elaunch --config job.yaml --max-restarts 0          options from a file; any failure ends the job
  elaunch --nnodes 2 --rdzv-endpoint node0:2379 train.py  on node0; it prints the line for the other
"""

_FOOT = """\
An option can be written with _ for -, shortened while it stays unambiguous, given as a variable
(PET_MAX_RESTARTS=1) or in a job file; the command line wins over variables, these over the file.
A script called - is read from stdin. Options of Python, as in `python -X dev -m elaunch`, are kept.
Exit codes: 0 all workers succeeded, 1 the job failed, 2 the command line is wrong, 3 the store or
an address was unavailable, or this node does not know how the job ended, 128 + N ended by signal N.
"""


def help_text() -> str:
    """Groups in order, one line for each option, then the settings that have an effect."""
    parts = [_HEAD]
    for group in Group:
        lines = [_line(option) for option in TABLE if option.group is group]
        parts.append("\n".join([f"{group.value}:", *lines, ""]))
    settings = [f"  {', '.join(each.names):<{_COLUMN}} {each.help}" for each in SETTINGS if not each.no_effect]
    parts.append("\n".join(["Settings of --rdzv-conf, for several nodes:", *settings, ""]))
    return "\n".join([*parts, _FOOT]).rstrip("\n")


def _line(option: Option) -> str:
    default = f" [{option.default_text}]" if option.default_text else ""
    return f"  {option.usage:<{_COLUMN}} {option.help}{default}"
