"""`elaunch submit slurm`: the batch script of a job, shown or handed to `sbatch`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.options import rdzv_conf, values
from elaunch.launcher.options.options import HelpRequested, Options, parse
from elaunch.launcher.options.shell_words import is_one_line, joined, quoted
from elaunch.launcher.preflight import check_script
from elaunch.launcher.submit.flags import Flag, Submission, help_text, take
from elaunch.rendezvous.types import ProgramKind

FLAGS = (
    Flag("nodes", "MIN:MAX", "a number, or a range: the job goes on with what is left of it [1]"),
    Flag("gpus", "N", "on each node, and a worker for each [what the node has]"),
    Flag("cpus", "N", "on each node [the whole node, for this job alone]"),
    Flag("time", "LIMIT", "as sbatch takes it: minutes, HH:MM:SS, DAYS-HH [the partition's]"),
    Flag("partition", "NAME", "where [the site's]"),
    Flag("account", "NAME", "who pays [the user's]"),
    Flag("qos", "NAME", "a quality of service [the user's]"),
    Flag("name", "NAME", "of the job [the program's]"),
    Flag("output", "FILE", "where its output goes [NAME-JOB.out]"),
    Flag("notice", "SECONDS", "before its time is over: workers save, and it is queued again [60]"),
    Flag("requeue", "", "queue it again then, and after a lost node [so it is]"),
    Flag("no-requeue", "", "do not"),
    Flag("sbatch", "OPTION", "any other of sbatch, as --sbatch=--constraint=h100; may be given again", many=True),
    Flag("dry-run", "", "show the script, submit nothing"),
    Flag("help", "", "show this text"),
)
_USAGE = """\
Usage: elaunch submit slurm [options] [elaunch options] train.py args…

Write a batch script that starts elaunch on every node of a Slurm job, and hand it to sbatch.
"""
_END = "Needs sbatch. docs/slurm.md has more.\n"

_CALL_S = 60.0

Checked = TypeVar("Checked")


@dataclass(frozen=True)
class Request:
    """A job for Slurm. `words` is elaunch's command line, from its options on; None leaves it to the site.

    `site` and `more` are options of sbatch; those of `more` are the user's own, who has the last word. `program` is the
    script, if it is one, and is looked for where sbatch is called.
    """

    words: tuple[str, ...]
    name: str
    program: str = ""
    nodes: tuple[int, int] = (1, 1)
    gpus: int | None = None
    cpus: int | None = None
    output: str = "%x-%j.out"
    notice_s: int = 60
    requeues: bool = True
    site: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Show the script or submit it; the exit code. Raises UsageError and SiteError."""
    submission = take(["--help" if word == "-h" else word for word in argv[:1]] + list(argv[1:]), FLAGS)
    if "help" in submission.given:
        print(help_text(_USAGE, FLAGS, _END), end="")
        return 0
    request = understand(submission, environ)
    text = script(request, "elaunch" if shutil.which("elaunch") else f"{quoted(sys.executable)} -m elaunch")
    if "dry-run" in submission.given:
        # Write the bytes that were typed, whatever stdout's encoding is.
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(text))
        return 0
    _look_for(request)
    print(f"submitted as job {_submit(text, environ)}; squeue shows it, scancel ends it")
    return 0


def understand(submission: Submission, environ: Mapping[str, str]) -> Request:
    """What is asked for; elaunch's own words are checked as elaunch will. Raises UsageError."""
    given, words = submission.given, submission.command
    if {"requeue", "no-requeue"} <= given.keys():
        raise UsageError("--requeue contradicts --no-requeue; drop one of them")
    for name, several in given.items():
        for value in several:
            if not is_one_line(value) or not _is_text(value):
                raise UsageError(
                    f"--{name} {value!r} has a line break or another control character, or is no UTF-8; an option of"
                    " sbatch is one line of text"
                )
    checked = parse(words, environ)
    if isinstance(checked, HelpRequested):
        raise UsageError("submit slurm takes a program: elaunch submit slurm --nodes 2 train.py")
    rdzv_conf.understand(checked.rdzv_conf)
    nodes = _checked("nodes", submission.last("nodes", "1"), values.nodes)
    _check(checked, nodes)
    if nodes[0] < nodes[1] and "nnodes" not in checked.given:
        words = ("--nnodes", f"{nodes[0]}:{nodes[1]}", *words)
    site = [f"--{name}={given[name][0]}" for name in ("time", "partition", "account", "qos") if name in given]
    return Request(
        words=words,
        name=submission.last("name") or _name(checked),
        program=checked.target if checked.kind is ProgramKind.SCRIPT else "",
        nodes=nodes,
        gpus=_checked("gpus", given["gpus"][0], _count) if "gpus" in given else None,
        cpus=_checked("cpus", given["cpus"][0], _count) if "cpus" in given else None,
        output=submission.last("output", Request.output),
        notice_s=_checked("notice", submission.last("notice", "60"), _count),
        requeues="no-requeue" not in given,
        site=tuple(site),
        more=given.get("sbatch", ()),
    )


def _check(options: Options, nodes: tuple[int, int]) -> None:
    """Raises UsageError for what each of the nodes would refuse, or what would make each a job of its own."""
    if options.kind is ProgramKind.SCRIPT and options.target == "-":
        raise UsageError("a batch job has no stdin for the program (-); put it into a file that the nodes see")
    for dest in ("standalone", "node_rank"):
        if nodes[1] > 1 and dest in options.given:
            raise UsageError(f"--{dest.replace('_', '-')} is the same on all nodes of --nodes {nodes[1]}; leave it out")
    if "nnodes" in options.given and options.nnodes[0] > nodes[0]:
        raise UsageError(
            f"--nnodes {options.nnodes[0]} is more than the nodes that Slurm may give the job, --nodes {nodes[0]};"
            " leave --nnodes out, or raise --nodes"
        )


def _is_text(value: str) -> bool:
    """Whether the value was UTF-8: Python keeps other bytes as lone surrogates."""
    return not re.search(r"[\ud800-\udfff]", value)


def _name(options: Options) -> str:
    """The job's name: the program's, without characters that could break the script's line."""
    made = options.target if options.kind is ProgramKind.MODULE else Path(options.target).stem
    return "".join(character if character.isalnum() or character in "._+-" else "_" for character in made) or "elaunch"


def script(request: Request, elaunch: str = "elaunch") -> str:
    """The batch script; `elaunch` is how that is called on the nodes."""
    least, most = request.nodes
    is_elastic = least < most
    lines = [
        f"--job-name={request.name}",
        f"--nodes={least}-{most}" if is_elastic else f"--nodes={most}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={request.gpus}"] if request.gpus else []),
        f"--cpus-per-task={request.cpus}" if request.cpus else "--exclusive",
        *request.site,
        f"--signal=USR1@{request.notice_s}",
        "--requeue" if request.requeues else "--no-requeue",
        *(["--no-kill"] if is_elastic else []),
        "--open-mode=append",
        f"--output={request.output}",
        *request.more,
    ]
    # srun takes no CPUs over from the job (Slurm 22.05 and later), and must not end all for one node.
    cpus = f" --cpus-per-task={request.cpus}" if request.cpus else ""
    kill = " --no-kill" if is_elastic else ""
    again = (
        "# 138: Slurm's notice (SIGUSR1) came before the end of its time, and training has saved. It goes on later.\n"
        'if [ "$code" = 138 ]; then scontrol requeue "$SLURM_JOB_ID"; fi\n'
        if request.requeues
        else ""
    )
    return (
        "#!/bin/bash\n"
        + "".join(f"#SBATCH {_quoted(line)}\n" for line in lines)
        + f"\n# One agent on each node: it starts a worker for each GPU.\n"
        f"srun{cpus} --cpu-bind=none --kill-on-bad-exit=0{kill} {elaunch} {joined(request.words)}\n"
        f"code=$?\n{again}exit $code\n"
    )


def _quoted(option: str) -> str:
    """An option of sbatch as it reads its lines: words end at blanks, # begins a comment, a backslash escapes."""
    found = re.fullmatch(r"(--?[\w-]+(?:=| +))(.*)", option)
    name, value = (found[1], found[2]) if found else ("", option)
    if re.fullmatch(r"[^\s#'\"\\]+", value):
        return option
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}"{escaped}"'


def _count(raw: values.Raw) -> int:
    return values.whole(raw, low=1)


def _checked(name: str, value: str, convert: Callable[[values.Raw], Checked]) -> Checked:
    try:
        return convert(value)
    except ValueError as error:
        raise UsageError(f"--{name} {value} {error}") from None


def _look_for(request: Request) -> None:
    """What would come to nothing is told now, not when the job's turn has come. Raises UsageError."""
    if shutil.which("sbatch") is None:
        raise UsageError(
            "no sbatch on the PATH: this host hands nothing in to Slurm; log in to one that does, or add --dry-run"
        )
    is_elsewhere = any(re.match(r"--chdir\b|-D", option) for option in request.more)
    if request.program and not is_elsewhere:
        try:
            check_script(request.program)
        except (UsageError, OSError) as error:
            raise UsageError(f"{error}; where only the nodes see it: --dry-run, and hand that to sbatch") from None


def _submit(text: str, environ: Mapping[str, str]) -> str:
    """Hand the script to sbatch, which gives the job `environ`. Returns the job's number."""
    command = [shutil.which("sbatch") or "sbatch", "--parsable"]
    try:
        done = subprocess.run(command, env=environ, input=os.fsencode(text), capture_output=True, timeout=_CALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SiteError(f"sbatch: {error}") from None
    told, complained = (stream.decode(errors="replace").strip() for stream in (done.stdout, done.stderr))
    if done.returncode:
        said = re.sub(r"^sbatch: (error: )?", "", complained, flags=re.MULTILINE).replace("\n", "; ")
        raise SiteError(f"sbatch did not take the job: {said}")
    # With several clusters it is NUMBER;CLUSTER.
    return told.partition(";")[0]
