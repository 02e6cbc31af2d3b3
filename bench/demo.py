"""`make demo`: a training whose ranks are killed twice, and the same training left alone; both must be equal.

    python -m bench.demo [--steps N] [--out DIR]

Everything is real and done here: the kills are this program's own (it logs them), the times come from the job's
timeline by `elaunch report`, and the result is compared with that of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# About 25 s on two cores, of which three starts of all workers are some four.
STEPS = 240
_LOOK_S = 0.05
_WORKERS = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DemoFailed(Exception):
    """Something went wrong that the demo cannot show: one sentence."""


class Interrupted(BaseException):
    """The user has enough: a signal came."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class Kill:
    """A kill that the demo does: rank `rank`, once `step` is done."""

    step: int
    rank: int


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if the killed training is equal to the other one; 128 + n after signal n."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="optimizer steps of each training (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="a new folder (default: %(default)s)")
    options = parser.parse_args(argv)
    for signum in _SIGNALS:
        signal.signal(signum, _interrupt)
    try:
        return run(options.out, options.steps)
    except (DemoFailed, OSError) as failed:
        print(f"demo: {failed}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        # The training that was stopped has logged where its output is, and what continues from it. So the folder stays.
        name = signal.Signals(interrupted.signum).name
        rest = (
            f"; {options.out} has what was done until then, and make demo begins again" if options.out.exists() else ""
        )
        print(f"demo: stopped by {name}; nothing of it runs any more{rest}", file=sys.stderr)
        return 128 + interrupted.signum


def _interrupt(signum: int, _frame: object) -> None:
    for each in _SIGNALS:
        # The end of the training is waited for: see `train`.
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(signum)


def run(out: Path, steps: int) -> int:
    """Both trainings, the comparison, the report. Raises DemoFailed."""
    if steps < 12:
        raise DemoFailed(f"--steps {steps} leaves no room for two kills; give at least 12")
    if out.exists():
        raise DemoFailed(f"{out} is there already; remove it or give another --out")
    kills = [Kill(steps // 3, 1), Kill(2 * steps // 3, 0)]
    _log(
        f"1. A small language model trains on {_WORKERS} workers. This demo kills rank 1 after step {kills[0].step} and"
        f" rank 0 after step {kills[1].step}, with kill -9."
    )
    logs = out / "logs"
    train(out / "killed", steps, ("--log-dir", str(logs)), kills)
    _log("2. The same training, with no kill, to compare. Its output goes to a file.")
    train(out / "calm", steps, log=out / "calm.log")
    page = (out / "report.html").absolute()
    summary = _report(logs, page)
    differences = list(differing(out / "killed", out / "calm"))
    _log("3. What happened, as elaunch report shows it:")
    for line in story(summary, differences, page):
        print(line, flush=True)
    is_as_promised = not differences and summary["steps_lost"] == 0 and len(_causes(summary)) == len(kills)
    return 0 if is_as_promised else 1


def train(
    out: Path, steps: int, options: Sequence[str] = (), kills: Sequence[Kill] = (), log: Path | None = None
) -> None:
    """One training, whose ranks are killed meanwhile. With `log` its output goes there.

    Raises DemoFailed if it does not succeed.
    """
    program = ["-m", "elaunch.trainer", "--out", str(out), "--steps", str(steps)]
    arguments = ["--nproc-per-node", str(_WORKERS), *options, *program]
    print(f"$ {shlex.join(['elaunch', *arguments])}", flush=True)
    with ExitStack() as stack:
        target = stack.enter_context(log.open("wb")) if log else None
        command = [sys.executable, "-m", "elaunch", *arguments]
        # In a session of its own: Ctrl-C at the terminal reaches it through this process alone, and so once.
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=target, stderr=target, start_new_session=True)
        try:
            _strike(job, kills, out, out.parent / "logs")
            code = job.wait()
        except BaseException as error:
            for signum in _SIGNALS if isinstance(error, Interrupted) else ():
                # Ctrl-C again ends it at once.
                signal.signal(signum, lambda again, _: job.send_signal(again))
            job.send_signal(error.signum if isinstance(error, Interrupted) else signal.SIGTERM)
            job.wait()
            raise
    if code:
        raise DemoFailed(f"the training ended with exit code {code}{f'; {log} has its output' if log else ''}")


def _strike(job: subprocess.Popen[bytes], kills: Sequence[Kill], out: Path, logs: Path) -> None:
    """Kill each rank once its step is done. Raises DemoFailed if the job ends before."""
    for kill in kills:
        while _newest_step(out / "metrics.jsonl") < kill.step:
            if job.poll() is not None:
                raise DemoFailed(f"the training ended with exit code {job.returncode} before step {kill.step}")
            time.sleep(_LOOK_S)
        pid = _pid_of(kill.rank, logs / "latest" / "timeline.jsonl")
        print(f"demo: kill -9 {pid}    # rank {kill.rank}", flush=True)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise DemoFailed(
                f"rank {kill.rank} (pid {pid}) had ended before it could be killed; the training was too fast for that:"
                " give more --steps"
            ) from None


def _newest_step(metrics: Path) -> int:
    """The step of the last whole line, 0 before the first."""
    rows = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    return int(json.loads(rows[-1])["step"]) if rows else 0


def _pid_of(rank: int, timeline: Path) -> int:
    """The pid of a rank's newest worker."""
    if not timeline.exists():
        raise DemoFailed(f"the training wrote no {timeline}")
    found = [event["pid"] for event in _lines(timeline) if event["event"] == "forked" and event["rank"] == rank]
    if not found:
        raise DemoFailed(f"{timeline} names no worker of rank {rank}")
    return int(found[-1])


def _lines(path: Path) -> Iterator[Any]:
    """The whole lines of a file of JSON lines."""
    for row in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(row)


def differing(one: Path, other: Path) -> Iterator[str]:
    """In what two runs differ: the parameters' digest, and each step's loss, to the last bit."""
    results = [json.loads((run / "result.json").read_text()) for run in (one, other)]
    for key in ("steps", "params_sha256", "loss", "held_out_loss", "samples_seen"):
        if results[0][key] != results[1][key]:
            yield f"{key} is {results[0][key]}, and {results[1][key]} in the undisturbed run"
    losses = [[(row["step"], row["loss"]) for row in _lines(run / "metrics.jsonl")] for run in (one, other)]
    if losses[0] != losses[1]:
        apart = next((a[0] for a, b in zip(*losses, strict=False) if a != b), min(map(len, losses)) + 1)
        yield f"the losses differ from step {apart} on"


def _report(logs: Path, page: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "elaunch", "report", str(logs), "-o", str(page), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DemoFailed(f"elaunch report ended with exit code {done.returncode}: {done.stderr.strip()}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def story(summary: Mapping[str, Any], differences: Sequence[str], page: Path) -> Iterator[str]:
    """The end of the demo, line by line."""
    yield f"   {summary['headline']}"
    for number, cause in enumerate(_causes(summary), 1):
        again = cause["recovery_s"]
        later = f"trained again {again:.2f} s later" if again is not None else "did not train again"
        yield f"   failure {number}: {cause['sentence']}; {later}"
    trained, wall = summary["breakdown_s"]["training"], summary["wall_s"]
    yield f"   ETTR {100 * summary['ettr']:.1f} %: {trained:.1f} s of {wall:.1f} s were training; {_others(summary)}"
    if differences:
        yield from (f"   NOT EQUAL to the undisturbed run: {difference}" for difference in differences)
    else:
        yield "   equal to the undisturbed run, bit for bit: all parameters, and the loss of every step"
    yield f"   the page: file://{page}"


def _others(summary: Mapping[str, Any]) -> str:
    stages = {name: seconds for name, seconds in summary["breakdown_s"].items() if seconds and name != "training"}
    most = sorted(stages, key=lambda name: -stages[name])[:3]
    return "most of the rest: " + ", ".join(f"{name.replace('_', '-')} {stages[name]:.2f} s" for name in most)


def _causes(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [failure for failure in summary["failures"] if failure["is_cause"]]


def _log(sentence: str) -> None:
    print(f"\ndemo: {sentence}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
