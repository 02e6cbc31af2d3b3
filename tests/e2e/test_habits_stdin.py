"""`elaunch - < script.py`: the script comes on stdin, as with `python -u -`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.habits import same, worker
from tests.harness import FRESH, LIGHT

SCRIPTS = {
    "no newline at the end": "print('said')",
    "no text": "# w\xf6rds\nprint('w\xf6rds')\n",
    "nothing": "",
    "syntax error": "print('not this')\ndef f(:\n",
    "long": "x = 0\n" + "x += 1\n" * 20_000 + "print(x)\n",
}
# These also run with --no-preload, where Python itself reads the bytes.
TWICE = ("no text", "long")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_on_stdin_runs_as_python_runs_it(tmp_path: Path, name: str) -> None:
    same(tmp_path, "-", "--lr", "0.1", stdin=SCRIPTS[name].encode(), no_preload=name in TWICE)


@pytest.mark.parametrize("how", [LIGHT, FRESH], ids=["forked", "no-preload"])
def test_every_worker_of_every_generation_has_the_whole_script(tmp_path: Path, how: tuple[str, ...]) -> None:
    text = (
        "import os, sys, time\n"
        "rank, generation = os.environ['RANK'], os.environ['ELAUNCH_GENERATION']\n"
        "print('here', rank, generation, sys.argv[1:], repr(sys.stdin.read()), flush=True)\n"
        "open(f'up{rank}{generation}', 'w').close()\n"
        "while not os.path.exists(f'up{1 - int(rank)}{generation}'): time.sleep(0.005)\n"
        "if rank == '1' and generation < '2': os.kill(os.getpid(), 9)\n"
        "if generation < '2': time.sleep(60)\n"
    )

    options = (*how, "--nproc-per-node", "2", "--max-restarts", "2")
    run = worker(tmp_path, "-", "-x", how=options, stdin=text.encode())

    assert run.code == 0, str(run)
    expected = [f"[{rank}] here {rank} {generation} ['-x'] ''" for generation in range(3) for rank in range(2)]
    assert sorted(run.out.decode().splitlines()) == sorted(expected)
