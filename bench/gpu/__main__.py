"""`python -m bench.gpu`: runs the parts one after the other until the time is over, and writes bench/results/gpu.md."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.gpu.parts import ROOT, Part, failed, parts, render, update
from bench.samples import describe
from tests.harness import environment

PAGE = ROOT / "bench" / "results" / "gpu.md"
# Under nine minutes, with the time that Make and the last part's end need.
BUDGET_S = 525.0
# A part that has less than this is not begun.
_LEAST_S = 20.0
_GRACE_S = 8.0
_LAST_LINES = 3
# The block to send: docs/gpu.md.
BLOCK = "## Results of `make gpu`: please paste everything from this line on into an issue"
_ERROR = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception)\b")

Log = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a part went wrong."""
    parser = argparse.ArgumentParser(prog="make gpu")
    parser.add_argument("--began-s", type=float, default=time.monotonic(), help="when it began, as time.monotonic()")
    parser.add_argument("--only", default="", metavar="PART,…", help="these parts alone; the page stays as it is")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    options = parser.parse_args(argv)
    out = ROOT / "runs" / "gpu" / time.strftime("%Y%m%d-%H%M%S")
    wanted = parts(out)
    if options.only:
        names = options.only.split(",")
        if unknown := sorted(set(names) - {part.name for part in wanted}):
            print(f"--only: there is no {', '.join(unknown)}; there are {', '.join(p.name for p in wanted)}")
            return 2
        wanted = [part for part in wanted if part.name in names]
    out.mkdir(parents=True)
    found = run_all(wanted, options.began_s + BUDGET_S, _log)
    results: dict[str, Any] = {"machine": describe(), "parts": found}
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"{BLOCK}\n\n{render(results)}")
    if not options.only:
        options.page.write_text(update(options.page.read_text(), results))
        _log(f"{options.page} has the figures; {out} has all output")
    wrong = failed(results["parts"])
    if wrong:
        _log(f"went wrong: {', '.join(wrong)}; see {out}")
    return 1 if wrong else 0


def run_all(wanted: Sequence[Part], end_s: float, log: Log) -> dict[str, dict[str, Any]]:
    """Run the parts until `end_s` (monotonic). Each gives `figures`, or `why` not; `went_wrong` if it should have."""
    results: dict[str, dict[str, Any]] = {}
    for part in wanted:
        left_s = end_s - time.monotonic()
        if left_s < _LEAST_S:
            results[part.name] = {"why": "the nine minutes were over"}
        else:
            log(f"{part.name}: at most {min(part.limit_s, left_s):.0f} s")
            results[part.name] = run(part, min(part.limit_s, left_s))
        if why := results[part.name].get("why"):
            log(f"{part.name}: {why}")
    return results


def run(part: Part, limit_s: float) -> dict[str, Any]:
    """Run one part. Its output is in its folder."""
    began_s = time.monotonic()
    part.folder.mkdir(parents=True)
    log = part.folder / "output.txt"
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT if "PYTHONPATH" in part.env else part.folder,
                env=environment(part.env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = _wait(process, limit_s)
    except OSError as error:
        return {"why": f"it could not be run: {error}", "went_wrong": True}
    output = log.read_text(errors="replace")
    took = {"took_s": round(time.monotonic() - began_s, 1)}
    late = f"it did not end within {limit_s:.0f} s" if code is None else ""
    try:
        figures = part.read(output)
    except (OSError, ValueError, KeyError, TypeError) as error:
        figures, late = {}, late or f"exit code {code}, no figures ({error}): {last_error(output)}"
    # A bench that was stopped has samples. Failed tests are figures: they are reported with the others.
    why = late or (f"exit code {code}" if code and "wrong" not in figures else "")
    # The nine minutes may have cut it short.
    went_wrong = bool(why) and (code is not None or limit_s >= part.limit_s)
    return {
        **({"figures": figures} if figures else {}),
        **({"why": why, "went_wrong": went_wrong} if why else {}),
        **took,
    }


def last_error(output: str) -> str:
    """The last line that names an error, or else the last lines: a launcher's report follows the error."""
    lines = [line.strip()[:200] for line in output.strip().splitlines()]
    named = [line for line in lines if _ERROR.match(line)]
    return named[-1] if named else " | ".join(lines[-_LAST_LINES:])


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code; None at the time limit. All that the part has started ends with it."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        # The session's other processes too: elaunch's guardian has one of its own, and cleans up behind the agent.
        _signal(process, signal.SIGKILL)
        process.wait()
    return None


def _signal(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


def _log(text: str) -> None:
    print(f"make gpu: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
