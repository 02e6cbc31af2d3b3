"""`elaunch submit slurm`: writes the batch script of a job, and shows it or submits it with `sbatch`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import jinja2

from elaunch.agent.environment import outside
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.options import values
from elaunch.launcher.options.command_line import Option
from elaunch.launcher.options.options import JobCommand, Options, argv_of, submitted
from elaunch.launcher.preflight import check_script
from elaunch.rendezvous.types import ProgramKind

_CALL_S = 60.0


def _main(ctx: click.Context) -> int:
    """Show the script or submit it. Returns the exit code. Raises UsageError and SiteError."""
    options = job_of(ctx)
    elaunch = "elaunch" if shutil.which("elaunch") else f"{shlex.quote(sys.executable)} -m elaunch"
    text = script(options, ctx.params, elaunch)
    if ctx.params["dry_run"]:
        # Write the bytes that were typed, whatever stdout's encoding is.
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(text))
        return 0
    _check_submittable(options, ctx.params["sbatch"])
    print(f"submitted as job {_submit(text, outside(ctx.obj.environ))}; squeue shows it, scancel ends it")
    return 0


def job_of(ctx: click.Context) -> Options:
    """The job to submit. Raises UsageError, also if elaunch would refuse its command line."""
    options, nodes = submitted(ctx, outside(ctx.obj.environ)), ctx.params["nodes"]
    # Every node would refuse these, or be a separate job.
    for dest in ("standalone", "node_rank"):
        if nodes[1] > 1 and dest in options.given:
            raise UsageError(f"--{dest.replace('_', '-')} is the same on all nodes of --nodes {nodes[1]}; leave it out")
    if "nnodes" in options.given and options.nnodes[0] > nodes[0]:
        raise UsageError(
            f"--nnodes {options.nnodes[0]} is more than the nodes that Slurm may give the job, --nodes {nodes[0]};"
            " leave --nnodes out, or raise --nodes"
        )
    if nodes[0] < nodes[1] and "nnodes" not in options.given:
        return replace(options, typed={"nnodes": f"{nodes[0]}:{nodes[1]}", **options.typed})
    return options


def _one_line(raw: values.Raw) -> str:
    if not str(raw).isprintable():
        raise ValueError("has a line break or another control character, or is not UTF-8; give one line of text")
    return str(raw)


_ELASTIC = "number of nodes, or a range: the job continues while MIN nodes are left [1]"
_NOTICE = "this long before the time limit, workers save and the job is requeued [60]"
_SBATCH = "another option of sbatch, like --sbatch=--constraint=h100; may be repeated"
_OPTIONS = (
    Option("nodes", "MIN:MAX", _ELASTIC, values.nodes, default=(1, 1)),
    Option("gpus", "N", "GPUs per node, with one worker for each [all GPUs of the node]", values.count),
    Option("cpus", "N", "CPUs per node [the whole node, exclusively]", values.count),
    Option("time", "LIMIT", "time limit in sbatch's formats: minutes, HH:MM:SS, DAYS-HH [the partition's]", _one_line),
    Option("partition", "NAME", "partition of the job [the site's]", _one_line),
    Option("account", "NAME", "account that is charged [the user's]", _one_line),
    Option("qos", "NAME", "quality of service [the user's]", _one_line),
    Option("name", "NAME", "name of the job [the program's name]", _one_line),
    Option("output", "FILE", "file for the job's output [NAME-JOB.out]", _one_line, default="%x-%j.out"),
    Option("notice", "SECONDS", _NOTICE, values.count, default=60),
    Option("no-requeue", "", "do not requeue the job at its time limit and after a lost node"),
    Option("sbatch", "OPTION", _SBATCH, _one_line, multiple=True),
    Option("dry-run", "", "show the script, submit nothing"),
)
COMMAND = JobCommand(
    "slurm",
    _main,
    _OPTIONS,
    usage=["[options] [elaunch options] train.py args…"],
    about="Write a batch script that starts elaunch on every node of a Slurm job, and submit it with sbatch.",
    ending="Needs sbatch.",
    is_elsewhere=True,
)


def _name(options: Options) -> str:
    """The job's name: the program's name without characters that could break the script's line."""
    made = options.target if options.kind is ProgramKind.MODULE else Path(options.target).stem
    return "".join(character if character.isalnum() or character in "._+-" else "_" for character in made) or "elaunch"


def script(options: Options, given: Mapping[str, Any], elaunch: str = "elaunch") -> str:
    """The batch script. `given` are the options of this command, `elaunch` is the command of elaunch on the nodes."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quoted": _quoted, "word": _word}
    template = environment.from_string(Path(__file__).with_name("batch.sh").read_text())
    argv = argv_of(options.typed, options.program)
    return template.render(name=given["name"] or _name(options), argv=argv, given=given, elaunch=elaunch)


def _quoted(option: str) -> str:
    """An option quoted as sbatch reads its lines: arguments end at blanks, # begins a comment, a backslash escapes."""
    found = re.fullmatch(r"(--?[\w-]+(?:=| +))(.*)", option)
    name, value = (found[1], found[2]) if found else ("", option)
    if re.fullmatch(r"[^\s#'\"\\]+", value):
        return option
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}"{escaped}"'


def _word(word: str) -> str:
    """`word` as one word of bash, on one line: sbatch refuses some line breaks, also in quotes."""
    if word.isprintable():
        return shlex.quote(word)
    pieces = (
        each if each.isprintable() and each not in "'\\" else "".join(f"\\x{byte:02x}" for byte in os.fsencode(each))
        for each in word
    )
    return f"$'{''.join(pieces)}'"


def _check_submittable(options: Options, sbatch: Sequence[str]) -> None:
    """Raises UsageError for a job that cannot work, before it waits in the queue."""
    if shutil.which("sbatch") is None:
        raise UsageError(
            "no sbatch on the PATH: this host cannot submit jobs to Slurm; log in to a host that can, or add --dry-run"
        )
    is_elsewhere = any(re.match(r"--chdir\b|-D", option) for option in sbatch)
    if options.kind is ProgramKind.SCRIPT and not is_elsewhere:
        try:
            check_script(options.target)
        except (UsageError, OSError) as error:
            raise UsageError(f"{error}; if only the nodes see it, use --dry-run and sbatch") from None


def _submit(text: str, environ: Mapping[str, str]) -> str:
    """Submit the script with sbatch, which gives the job `environ`. Returns the job's number. Raises SiteError."""
    command = [shutil.which("sbatch") or "sbatch", "--parsable"]
    try:
        done = subprocess.run(command, env=environ, input=os.fsencode(text), capture_output=True, timeout=_CALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SiteError(f"sbatch: {error}") from None
    number, errors = (stream.decode(errors="replace").strip() for stream in (done.stdout, done.stderr))
    if done.returncode:
        reason = re.sub(r"^sbatch: (error: )?", "", errors, flags=re.MULTILINE).replace("\n", "; ")
        raise SiteError(f"sbatch refused the job: {reason}")
    # With several clusters the output is NUMBER;CLUSTER.
    return number.partition(";")[0]
