"""`elaunch - < script.py`: the script comes on stdin, as with `python -u -`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.fidelity.turns import Turns, taken
from tests.e2e.habits import LIGHT, NO_PRELOAD, fresh, same, worker

SCRIPTS = {
    "facts": "import os, sys\nprint(sys.argv, sys.path[0], sys.orig_argv[1:], __name__, globals().get('__file__'))\n"
    "print(__spec__, type(__loader__).__name__, __package__)\n",
    "the rest of stdin": "import sys\nprint(repr(sys.stdin.read()))\n'the last line of the script'\n",
    "asks": "try: print(input())\nexcept EOFError: print('nobody to ask')\n",
    "no newline at the end": "print('said')",
    "no text": "# w\xf6rds\nprint('w\xf6rds')\n",
    "nothing": "",
    "raises": "def f():\n    raise ValueError('from stdin')\nf()\n",
    "exits 3": "import sys\nprint('before')\nsys.exit(3)\n",
    "syntax error": "print('not this')\ndef f(:\n",
    "long": "x = 0\n" + "x += 1\n" * 20_000 + "print(x)\n",
    "child": "import os, subprocess, sys\n"
    "print(subprocess.run([sys.executable, '-c', 'import sys; print(repr(sys.stdin.read()))'], capture_output=True))\n",
    "forks": "import os\nif not os.fork(): os._exit(0)\nos.wait(); print('waited')\n",
    "own modules": "import helper\nprint(helper.NAME)\n",
}


# Scripts that are about their first or last bytes. The other scripts share one script, and run in turn.
WHOLE = ("no newline at the end", "no text", "nothing", "syntax error", "long")
# These also run with --no-preload, where Python itself reads the bytes.
TWICE = ("no text", "long")
IN_TURN = {name: text for name, text in SCRIPTS.items() if name not in WHOLE}


@pytest.mark.parametrize("name", WHOLE)
def test_a_script_on_stdin_runs_as_python_runs_it(tmp_path: Path, name: str) -> None:
    same(tmp_path, "-", "--lr", "0.1", stdin=SCRIPTS[name].encode(), no_preload=name in TWICE)


@pytest.fixture(scope="module", params=[LIGHT, NO_PRELOAD], ids=["forked", "no-preload"])
def turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Turns:
    folder = tmp_path_factory.mktemp("turns").resolve()
    (folder / "helper.py").write_text("NAME = 'beside nobody'\n")
    return taken(folder, request.param, IN_TURN, "--lr", "0.1", by_stdin=True)


@pytest.mark.parametrize("how", [LIGHT, NO_PRELOAD], ids=["forked", "no-preload"])
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


def test_data_on_stdin_is_the_first_workers_to_the_last_byte(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import hashlib, os, sys\ndata = sys.stdin.buffer.read()\n"
        "print(os.environ.get('RANK', '0'), len(data), hashlib.sha256(data).hexdigest())\n"
    )
    data = bytes(range(256)) * 20_000
    expected = fresh(tmp_path, "train.py", stdin=data)

    run = worker(tmp_path, "train.py", how=(*LIGHT, "--nproc-per-node", "2"), stdin=data)

    assert b"[0] " + expected.out in run.out, str(run)
    assert b"[1] 1 0 " in run.out
