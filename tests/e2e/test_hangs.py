"""Jobs that hang, without a word in the script: which rank is named, and what follows. Healthy programs do not hang."""

from __future__ import annotations

import re
import signal
import stat
from pathlib import Path

import pytest

from tests.harness import DEADLINE_S, Job, script
from tests.warm import SharedStart

# A second is the shortest time between two looks at a worker.
AFTER_S = "3"
OPTIONS = ("--hang-timeout", AFTER_S, "--nproc-per-node", "3", "--log-dir", "logs")

# In each generation rank ONE hangs in another way, and the others wait for it in a collective.
PROGRAM = """
import os, re, signal, sys, threading, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
GENERATION, RANK = int(os.environ["ELAUNCH_GENERATION"]), int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
CASES = sys.argv[1].split(",")
ONE = int(sys.argv[2]) if len(sys.argv) > 2 else 1
CASE = CASES[GENERATION] if GENERATION < len(CASES) else "well"
class Stuck(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
def python_loop():
    while True: pass
def c_loop():
    sum(range(10**14))
def bad_pattern():
    re.match(r"(a+)+$", "a" * 60 + "b")
def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
def loader():
    next(iter(DataLoader(Stuck(), num_workers=1)))
def never_comes():
    sys.exit(0)
def other_collective():
    dist.broadcast(torch.ones(4), 0)
def train_step():
    dist.all_reduce(torch.ones(4))
if CASE == "never_comes" and RANK == ONE:
    never_comes()
dist.init_process_group("gloo", world_size=WORLD_SIZE + (CASE == "too_many"), rank=RANK)
train_step()
if CASE == "in_a_circle":
    dist.recv(torch.ones(4), (RANK + 1) % WORLD_SIZE)
elif CASE != "well" and RANK == ONE:
    globals()[CASE]()
train_step()
print("done", CASE, flush=True)
"""
FOR_ALL = r"wait for the other ranks to make the process group \(<module>, train\.py:\d+\)"
SECOND = r"in collective 2 of the default group"
AFTER = r", after collective 1 of the default group"
WAIT = rf"ranks 0, 2 wait in all_reduce \(train_step, train\.py:\d+\), {SECOND}"
# How the failure's sentence goes on after "rank 1 (…)".
VERDICTS = {
    "python_loop": r"hung: it runs in python_loop \(train\.py:\d+\), at the same line in every sample"
    rf"{AFTER}, while {WAIT}",
    "c_loop": rf"hung: it runs in c_loop \(train\.py:\d+\), at the same line in every sample, while {WAIT}",
    "bad_pattern": rf"hung: it runs in bad_pattern \(train\.py:\d+\), at the same line in every sample, while {WAIT}",
    "stopped": rf"hung: it is stopped by a signal \(SIGSTOP\) \(stopped, train\.py:\d+\), while {WAIT}",
    "deadlock": rf"hung: it waits for a lock or for another thread \(deadlock, train\.py:\d+\){AFTER}, while {WAIT}",
    "loader": r"hung: it waits for its data loader \(loader, train\.py:\d+\), whose process \d+ waits for a lock or for"
    rf" another thread in Stuck\.__getitem__ \(train\.py:\d+\){AFTER}, while {WAIT}",
    "never_comes": rf"exited with code 0, while ranks 0, 2 {FOR_ALL}",
    "other_collective": r"hung: it waits in broadcast \(other_collective, train\.py:\d+\), in collective 2 of the"
    rf" default group, while {WAIT}",
}


# All ranks are alike, so none is named.
OF_ALL = {
    "too_many": rf"hung: all 3 ranks {FOR_ALL} for \d+ s and no rank is anywhere else",
    "in_a_circle": rf"hung: all 3 ranks wait in recv \(<module>, train\.py:\d+\){AFTER} for \d+ s and no rank is"
    " anywhere else",
}


def runs(folder: Path, start: SharedStart, *cases: str) -> Job:
    """The program through these hangs, one in each generation, and then to its end."""
    script(folder, PROGRAM)
    restarts = ("--max-restarts", str(len(cases)))
    with Job(folder, *start.options, *OPTIONS, *restarts, "train.py", ",".join(cases), env=start.env) as job:
        job.wait(DEADLINE_S + 15 * len(cases))
    return job


def assert_verdict(job: Job, generation: int, case: str) -> None:
    who = r"^elaunch: the job seems to hang: rank 1 (?:\(pid \d+ on \S+\)|on \S+) "
    # Once in the log, in the order of the generations; the report has the last one.
    words = f"{who}{VERDICTS[case].removeprefix('hung: it ')}, for \\d+ s$"
    verdicts = re.findall(r"^elaunch: the job seems to hang: .*$", job.stderr, re.MULTILINE)
    assert re.search(words, verdicts[generation]), f"{words}\n{job.stderr}"


def test_a_rank_in_a_deadlock_is_named_its_stacks_are_kept_and_the_job_starts_again(
    tmp_path: Path, torch_start: SharedStart
) -> None:
    job = runs(tmp_path, torch_start, "deadlock")

    assert job.code == 0, job.output
    assert_verdict(job, 0, "deadlock")
    assert re.search(
        r"^elaunch:   ranks 0, 2: all_reduce \(torch/distributed/\S+:\d+\) ← train_step", job.stderr, re.MULTILINE
    )
    assert re.search(r"^elaunch:   rank 1: deadlock \(train\.py:\d+\)$", job.stderr, re.MULTILINE)
    (kept,) = (tmp_path / "logs").glob("*_*/attempt_0/stacks.txt")
    assert "in deadlock" in kept.read_text()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert job.stdout.count("done well") == 3


@pytest.mark.slow
def test_each_type_of_hang_is_distinguished(tmp_path: Path, torch_start: SharedStart) -> None:
    job = runs(tmp_path, torch_start, *VERDICTS, *OF_ALL)

    assert job.code == 0, job.output
    for generation, case in enumerate(VERDICTS):
        assert_verdict(job, generation, case)
    verdicts = re.findall(r"^elaunch: the job seems to hang: .*$", job.stderr, re.MULTILINE)
    for generation, (case, words) in enumerate(OF_ALL.items(), len(VERDICTS)):
        assert re.search(words.removeprefix("hung: "), verdicts[generation]), (
            case,
            job.stderr,
        )
    assert job.stdout.count("done well") == 3


ENDS = """
import atexit, os, threading, time
def watch_forever():
    while os.getppid() > 1: time.sleep(0.1)
def clean_up():
    time.sleep(600)
print("ended", flush=True)
if os.environ["RANK"] == "1": threading.Thread(target=watch_forever).start()
if os.environ["RANK"] == "2": atexit.register(clean_up)
"""


def test_ranks_whose_programs_have_ended_while_their_processes_live_on_are_named(tmp_path: Path) -> None:
    script(tmp_path, ENDS)
    with Job(tmp_path, "--preload", "json", *OPTIONS[:4], "--run-id", "night", "train.py") as job:
        job.wait_for_output(r"elaunch stop night ends the job")
        job.wait_for_output(r"rank 1 is kept alive by thread .*, in watch_forever \(train\.py:4\)")
        job.process.send_signal(signal.SIGTERM)
        job.wait()

    ended = (
        r"^elaunch: the program of local rank [12].* ended \d+ s ago, but its process has not exited: elaunch stacks"
    )
    assert re.search(ended, job.stderr, re.MULTILINE), job.stderr
    assert "seems to hang" not in job.stderr


# Here a second stands for twenty: a hang takes 3 s, not 60. Each kind of slowness takes 13 s, so it stands for over
# four minutes. Each is a job of its own: a job learns from its pauses.
SLOW_S = 13
SLOW_PROGRAM = """
import collections, json, os, pickle, re, subprocess, sys, threading, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
RANK, WHAT, SLOW_S = int(os.environ["RANK"]), sys.argv[1], float(sys.argv[2])
END_S = time.monotonic() + SLOW_S
def goes_on():
    return time.monotonic() < END_S
def slow_step():
    a = torch.randn(1200, 1200)
    while goes_on(): a = torch.tanh(a @ a)
def evaluation():
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    with torch.no_grad():
        while goes_on(): model(torch.randn(64, 256)).sum().item()
def checkpoint():
    state = {str(number): torch.randn(1000, 1000) for number in range(10)}
    while goes_on(): torch.save(state, "state.pt")
def slow_disk():
    with open("shard", "wb") as file:
        while goes_on():
            file.write(bytes(1 << 16))
            file.flush()
            time.sleep(0.5)
def stalled_loader():
    class Stalls(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index):
            if index == 1: time.sleep(SLOW_S)
            return torch.ones(4)
    list(DataLoader(Stalls(), num_workers=1))
def busy_loader():
    class Works(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index):
            while index == 1 and goes_on(): pass
            return torch.ones(4)
    list(DataLoader(Works(), num_workers=1))
def table():
    words, row = [i % 7 for i in range(20_000)], [0] * 20_001
    for i in range(len(words)):
        if not goes_on(): break
        for j in range(len(words)): row[j + 1] = min(row[j] + 1, row[j + 1] + 1, row[j] + (words[i] != words[j]))
def patterns():
    while goes_on(): re.sub(r"(\\w+) (\\w+)", r"\\2 \\1", "lorem ipsum dolor 123 " * 200_000)
def child():
    text = f"import time; end_s = time.monotonic() + {SLOW_S}\\nwhile time.monotonic() < end_s: pass"
    subprocess.run([sys.executable, "-c", text])
def compile():
    @torch.compile
    def function(x): return torch.sin(x) * torch.cos(x) + x.sum()
    function(torch.randn(100, 100))
def pause():
    time.sleep(SLOW_S)
dist.init_process_group("gloo")
torch.set_num_threads(1)
if RANK == 1: globals()[WHAT]()
dist.barrier()
print("done", RANK, flush=True)
"""
KINDS = [
    line[4:].partition("(")[0]
    for line in SLOW_PROGRAM.splitlines()
    if line.startswith("def ") and "goes_on" not in line[:12]
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_slow_does_not_hang(tmp_path: Path, kind: str) -> None:
    script(tmp_path, SLOW_PROGRAM)
    options = ("--hang-timeout", "3", "--on-hang", "warn", "--max-restarts", "0", "--nproc-per-node", "3")
    with Job(tmp_path, *options, "train.py", kind, str(SLOW_S)) as job:
        assert job.wait(180) == 0, job.output

    assert "hang" not in job.stderr, job.stderr
    assert job.stdout.count("done") == 3
