"""`python -m bench`: parse, take the samples, write them, print the tables; `--render` makes the page of them."""

from __future__ import annotations

import argparse
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import samples
from bench.job import ALL
from bench.launches import first_line
from bench.page import EMPTY, render, update
from bench.plan import NODES_SECTIONS, SECTIONS, Settings, Task, plan
from bench.samples import Run, Sample
from tests.nodes import missing

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "bench" / "results" / "README.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0; 2 for a request that makes no sense; 130 after Ctrl-C; 143 after SIGTERM."""
    options = _parser().parse_args(argv)
    # As after Ctrl-C: the bench ends its jobs and removes their folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.render:
        return _render(options.render, options.page)
    for option, given, known in (("only", options.only, SECTIONS), ("contenders", options.contenders, tuple(ALL))):
        if unknown := [name for name in given if name not in known]:
            print(f"--{option}: there is no {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    contenders = tuple(ALL[name] for name in options.contenders)
    if set(options.only) & set(NODES_SECTIONS) and (why := missing()):
        print(f"{', '.join(NODES_SECTIONS)}: {why}; name the other sections with --only", file=sys.stderr)
        return 2
    settings = Settings(
        options.samples, options.workers, options.agents, contenders, options.only, options.limit_s, seed
    )
    out = options.out or ROOT / "runs" / "bench" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    return _run(settings, out, options.page)


def _log(text: str) -> None:
    """A line of its own."""
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure elaunch beside torchrun. A whole run with the defaults takes hours on two cores.",
    )
    parser.add_argument("--samples", type=_positive, default=20, metavar="N", help="samples of each kind (20)")
    parser.add_argument(
        "--workers", type=_numbers, default=(1, 2, 4, 8), metavar="N,N", help="numbers of workers (1,2,4,8)"
    )
    parser.add_argument(
        "--agents", type=_numbers, default=(8, 64, 256, 1024), metavar="N,N", help="numbers of agents (8,64,256,1024)"
    )
    parser.add_argument("--contenders", type=_names, default=tuple(ALL), metavar="NAME,…", help=", ".join(ALL))
    parser.add_argument("--only", type=_names, default=SECTIONS, metavar="SECTION,…", help=", ".join(SECTIONS))
    parser.add_argument("--limit-s", type=float, default=40.0, metavar="S", help="time limit of one restart (40)")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="which ranks are killed, and when (a random one, printed)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="raw samples (runs/bench/<date>.json)")
    parser.add_argument(
        "--page", type=Path, default=PAGE, metavar="FILE", help="page that --render makes (bench/results/README.md)"
    )
    parser.add_argument(
        "--render",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing; make the parts of the page of which these files have samples",
    )
    return parser


def _run(settings: Settings, out: Path, page: Path) -> int:
    about, in_words = samples.describe(), _in_words(settings)
    tasks = plan(settings)
    _log(f"seed {settings.seed}; samples go to {out}; Ctrl-C stops the run and keeps its samples")
    taken: list[Sample] = []
    stopped: int | None = None
    try:
        _log("warming up: one job of each contender, not counted")
        for contender in settings.contenders:
            first_line(contender)
        _take(tasks, taken, lambda: samples.write(out, Run(about, in_words, tuple(taken))))
    except KeyboardInterrupt:
        stopped = 130
    except SystemExit:
        stopped = 143
    if not taken:
        _log("there are no samples")
        return stopped or 0
    print(render(Run(about, in_words, tuple(taken))), end="", flush=True)
    if stopped is not None:
        _log(f"stopped after {len(taken)} samples")
    # The interpreter is the one that was typed; the one on the PATH may be another.
    command = (sys.orig_argv[0], "-m", "bench", "--render", str(out), "--page", str(page))
    _log(f"this makes the parts of {page} of which there are samples: {shlex.join(command)}")
    return stopped or 0


def _take(tasks: list[Task], taken: list[Sample], keep: Callable[[], None]) -> None:
    for number, task in enumerate(tasks, 1):
        _log(f"{number} of {len(tasks)}: {task.round}: {task.key}")
        turn = iter(task.run())
        try:
            for sample in turn:
                taken.append(sample)
                if sample.why:
                    _log(f"  {sample.why}")
                keep()
        finally:
            # An unfinished job ends here, not when the garbage collector finds it.
            if close := getattr(turn, "close", None):
                close()


def _in_words(settings: Settings) -> dict[str, str]:
    return {
        "samples of each kind": str(settings.samples),
        "seed": str(settings.seed),
        "limit for one restart": f"{settings.limit_s:g} s",
        "threads per worker": "OMP_NUM_THREADS=1 for all",
    }


def _render(files: Sequence[Path], page: Path) -> int:
    try:
        fresh = page.read_text() if page.exists() else EMPTY
        for path in files:
            fresh = update(fresh, samples.decode(path.read_text()))
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(fresh)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"the page cannot be made: {error}", file=sys.stderr)
        return 2
    print(f"{page} is made from {', '.join(str(path) for path in files)}", file=sys.stderr)
    return 0


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(word) for word in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
