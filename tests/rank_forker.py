"""Forks ranks from one process that has imported torch: a group starts in 0.1 s. tests/ranks.py runs this script.

Its arguments name more modules to import. Each line of its input asks for one group: `{"script", "args", "envs",
"folder"}`, with an environment per rank. It answers with the ranks' pids, and later with `{"pid", "code"}` for each
rank that ends. Output goes to FOLDER/out.RANK and err.RANK.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
import traceback

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor


def become(script: str, args: list[str], env: dict[str, str], folder: str, rank: int) -> None:
    """In the child: become what a fresh `python script args` would be."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(f"{folder}/{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
    # A rank that hangs prints its stacks before the tests' own deadline.
    faulthandler.dump_traceback_later(50, file=2)
    os.environ.update(env)
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(script))  # noqa: PTH120
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tell(record: object) -> None:
    print(json.dumps(record), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    events = selectors.DefaultSelector()
    events.register(0, selectors.EVENT_READ)
    events.register(wake, selectors.EVENT_READ)
    alive: set[int] = set()
    tell("ready")
    pending = b""
    while True:
        for key, _ in events.select():
            content = os.read(key.fd, 65536)
            if key.fd == 0 and not content:
                for pid in alive:
                    os.killpg(pid, signal.SIGKILL)
                return
            if key.fd == 0:
                *lines, pending = (pending + content).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    pids = []
                    for rank, env in enumerate(order["envs"]):
                        pid = os.fork()
                        if not pid:
                            become(order["script"], order["args"], env, order["folder"], rank)
                        pids.append(pid)
                    alive |= set(pids)
                    tell({"pids": pids})
        while alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            alive.discard(pid)
            tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
