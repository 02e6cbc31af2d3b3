"""Processes that a program starts itself: multiprocessing and data loaders of every kind, compilers, programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fidelity.ways import caught_too, fresh, share, without_launchers, worker
from tests.harness import FRESH, LIGHT, finished, script, slow

METHODS = ("fork", "spawn", "forkserver")

POOLS = """
import json, multiprocessing, os, pickle, sys
from concurrent.futures import ProcessPoolExecutor

class Point:
    def __init__(self, x):
        self.x = x

def double(point):
    return Point(2 * point.x), __name__

def send(queue, point):
    queue.put((point, __name__))

def look(method):
    import signal
    main, me = sys.modules["__main__"], multiprocessing.current_process()
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return {
        "argv": sys.argv, "path": sys.path, "executable": sys.executable, "folder": os.getcwd(),
        "main": [main.__name__, main.__file__, str(getattr(main.__spec__, "name", None)), str(main.__package__)],
        "process": [me.name, me.daemon, me._inheriting if hasattr(me, "_inheriting") else None],
        "kin": [os.getppid() == PARENT, os.getsid(0) == SESSION],
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
        "environment": dict(os.environ),
        "fds": len([fd for fd in os.listdir("/proc/self/fd") if fd != os.environ.get("ELAUNCH_LINK")
                    and not any(its in os.path.realpath(f"/proc/self/fd/{fd}") for its in ("elaunch-crash", ".so"))])
            if method == "fork" else None,
        "command": open("/proc/self/cmdline").read() if method == "fork" else
            # The numbers of pipes.
            "".join(c for c in open("/proc/self/cmdline").read() if not c.isdigit()),
    }

PARENT, SESSION = os.getpid(), os.getsid(0)

if __name__ == "__main__":
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            (point, name), = pool.map(double, [Point(21)])
            inside = pool.apply(look, (method,))
            # The others import the program again, and have their own.
            inside["kin"] = inside["kin"] if method == "fork" else None
        queue = context.Queue()
        process = context.Process(target=send, args=(queue, Point(5)))
        process.start()
        sent, sender = queue.get()
        process.join()
        found[method] = [point.x, type(point) is Point, name, sent.x, type(sent) is Point, sender, process.exitcode]
        found[method + " inside"] = inside
    with ProcessPoolExecutor(1) as pool:
        found["futures"] = pool.submit(double, Point(1)).result()[0].x
    with multiprocessing.Manager() as manager:
        found["manager"] = list(manager.list([1, 2]))
    print(json.dumps(found))
"""

# Programs that need torch share one job: each rank runs a different program.
WITH_TORCH = """
import json, os, sys
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        worker = get_worker_info()
        return torch.tensor([index * index, worker.id if worker else 0, torch.get_num_threads()])

def loaded(method, **options):
    # Which squares, and by which process with how many threads.
    workers = 2 if method else 0
    loader = DataLoader(Squares(), batch_size=4, num_workers=workers, multiprocessing_context=method, shuffle=True,
                        generator=torch.Generator().manual_seed(3), **options)
    batches = [batch.tolist() for batch in loader]
    return [[[item[0] for item in batch] for batch in batches], [batch[0][1:] for batch in batches]]

if __name__ == "__main__":
    match os.environ["RANK"]:
        case "0":
            found = {"alone": loaded(None), "fork": loaded("fork")}
            found["persistent"] = loaded("fork", persistent_workers=True)
            print(json.dumps(found))
        case "1":
            torch.ones(300, 300) @ torch.ones(300, 300)
            if not os.fork():
                os._exit(int((torch.ones(2) * 2).sum().item()))
            print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def both(folder: Path, how: tuple[str, ...], text: str, *args: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The program's output as a worker and in a fresh interpreter. Both must succeed and print nothing else."""
    script(folder, text)
    args = args or ("train.py",)
    ends = worker(folder, how, *args), fresh(folder, *args, env={"OMP_NUM_THREADS": share(1)})
    for end in ends:
        assert (end.code, end.err) == (0, b""), end
    return json.loads(ends[0].out), json.loads(ends[1].out)


@pytest.mark.parametrize("form", [("train.py",), slow(("-m", "train"))], ids="-".join)
@pytest.mark.parametrize("how", [LIGHT, slow(FRESH)], ids=["forked", "execed"])
def test_pools_processes_and_queues_of_every_kind_work_and_see_the_same(
    tmp_path: Path, how: tuple[str, ...], form: tuple[str, ...]
) -> None:
    ours, theirs = both(tmp_path.resolve(), how, POOLS, *form)

    for method in METHODS:
        inside = ours[f"{method} inside"]
        inside["environment"] = without_launchers(inside["environment"])
    # A fork inherits faulthandler's handlers; what is exec'd does not.
    *rest, caught = theirs["fork inside"]["signals"]
    theirs["fork inside"]["signals"] = [*rest, f"\t{caught_too(caught)}\n"]
    # Compare one by one, since pytest shortens a long difference.
    for method in METHODS:
        for name, value in theirs.pop(f"{method} inside").items():
            assert ours[f"{method} inside"][name] == value, (method, name)
        del ours[f"{method} inside"]
    assert ours == theirs


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The output of both ranks of WITH_TORCH, which import torch only before they are forked."""
    folder = tmp_path_factory.mktemp("torch")
    script(folder, WITH_TORCH)
    options = ("--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", "logs", "-r", "3")

    # Each program's own process has two threads.
    env = {"OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore"}
    job = finished(folder, "--preload", "torch", *options, "train.py", env=env)

    assert job.code == 0, job.output
    assert "fresh interpreter" not in job.output
    ranks = [next(folder.glob(f"logs/*_*/attempt_0/{rank}")) for rank in range(2)]
    assert [(rank / "stderr.log").read_bytes() for rank in ranks] == [b""] * 2
    return [json.loads((rank / "stdout.log").read_text()) for rank in ranks]


def test_data_loaders_load_what_a_loop_loads_in_order_and_with_one_thread(with_torch: list[Any]) -> None:
    alone, _ = with_torch[0].pop("alone")

    assert with_torch[0] == {name: [alone, [[0, 1], [1, 1]]] for name in ("fork", "persistent")}


def test_a_script_that_has_used_torch_may_fork(with_torch: list[Any]) -> None:
    assert with_torch[1] == 4
