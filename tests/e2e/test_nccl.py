"""NCCL with several ranks, which may share one GPU (bench/scripts/devices.py), or the same with gloo without a GPU.

Slow tests: `make gpu` runs them on a machine with a GPU. See docs/gpu.md for what this set-up cannot show.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.faults.trainings import Training
from tests.harness import REPOSITORY, Job, finished, script

pytestmark = pytest.mark.slow
SCRIPTS = REPOSITORY / "bench" / "scripts"
ENV = {"PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}

# Generation g fails in step 3 g + 3, in the middle of its all-reduces, as the g-th case says.
KEPT = """
import os, signal, socket, sys, threading, time
CASES = [case.split("-") for case in sys.argv[1:]]
GENERATION = int(os.environ["ELAUNCH_GENERATION"])
HOW, HANDLING = CASES[GENERATION] if GENERATION < len(CASES) else ("calm", "3")
# The watchdog waits four times as long before it aborts or ends the process: a minute, else.
os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": HANDLING, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
# Also with a GPU for each rank: only a socket can be cut.
os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
import devices
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from elaunch.trainer import Keeper

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def cut():
    # All connections of this process but those to the store: the network fails, and nobody is dead.
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as held:
                if held.family in (socket.AF_INET, socket.AF_INET6) and held.getpeername()[1] != STORE_PORT:
                    held.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue

STORE_PORT = int(os.environ["MASTER_PORT"])
AT = 3 * GENERATION + 3
device = devices.join_group(15)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))).to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters())

def reduce(_, bucket):
    strikes = keeper.step + 1 == AT and devices.RANK == 1 and keeper_is_entered
    # The first bucket is summed, and the last one is not.
    if strikes and HOW == "between" and bucket.is_last():
        devices.finish()
        die()
    future = allreduce_hook(None, bucket)
    if strikes and HOW == "hang":
        time.sleep(600)
    if strikes and HOW in ("within", "cut") and bucket.index() == 0:
        threading.Timer(0.004, die if HOW == "within" else cut).start()
    return future

ddp.register_comm_hook(None, reduce)
def loss(step):
    return ddp(torch.full((4, 1024), step / 8 + devices.RANK, device=device)).square().mean()

keeper_is_entered = False
keeper = Keeper(ddp, optimizer, lose_at_most=1000, warm_up=lambda: loss(0).backward())
with keeper:
    keeper_is_entered = True
    for step in keeper.steps(3 * len(CASES) + 3):
        loss(step).backward()
        with keeper.commit():
            optimizer.step()
            optimizer.zero_grad()
words = [int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in model.parameters()]
print(f"rank {devices.RANK} ends with {words} on {dist.get_backend()}", flush=True)
dist.destroy_process_group()
"""
END = r"^\[\d+\] rank (\d+) ends with (.*)$"
# TORCH_NCCL_ASYNC_ERROR_HANDLING: 0 nothing is aborted, 1 the process ends, 2 the collective is aborted and the program
# continues (here half-reduced gradients could be committed), 3 the process ends and nothing is aborted.
CASES = [f"{how}-{handling}" for handling in range(4) for how in ("between", "within", "cut")]
# A collective that times out is aborted too.
ABORTED = ("cut-2", "hang-2")


@pytest.mark.parametrize(
    ("workers", "cases"),
    [(2, [*CASES, "hang-2"]), (4, ["between-3", "within-3"])],
)
def test_half_reduced_gradients_are_never_committed_and_no_step_is_lost(
    tmp_path: Path, workers: int, cases: list[str]
) -> None:
    script(tmp_path, KEPT)
    # After a cut the ranks hang if nothing is aborted; a hang is noticed after the group's timeout.
    options = ("--nproc-per-node", str(workers), "--hang-timeout", "4", "--max-restarts", str(len(cases)), "train.py")

    failing = finished(tmp_path, *options, *cases, env=ENV)
    calm = finished(tmp_path, *options, *["calm-3"] * len(cases), env=ENV)

    assert (calm.code, failing.code) == (0, 0), calm.output + failing.output
    ends = dict(re.findall(END, calm.output, re.MULTILINE))
    assert len(ends) == workers
    # Another state means that gradients of some ranks alone were applied, or that a step was left out or made twice.
    assert dict(re.findall(END, failing.output, re.MULTILINE)) == ends
    for generation, case in enumerate(cases):
        kept = f"restored step {3 * generation + 2} from memory (of generation {generation}); 0 steps are repeated"
        assert kept in failing.output, f"{case}: a survivor has not kept the step before\n{failing.output}"
        refused = f"BrokenGroup: step {3 * generation + 3} is not committed"
        if "nccl" in ends["0"] and case in ABORTED:
            assert refused in failing.output, f"{case}: the commit has not noticed an aborted all-reduce"


HANGS = """
import hashlib, os, sys, time
import devices
import torch, torch.distributed as dist
HOW = sys.argv[1] if os.environ["ELAUNCH_GENERATION"] == "0" else "well"

def waited(values):
    # The wait for a GPU spins in C, without the interpreter's lock. Gloo's would sleep: this one spins too.
    work = dist.all_reduce(values, async_op=True)
    if not devices.CUDA:
        while not work.is_completed():
            hashlib.pbkdf2_hmac("sha256", b"", b"", SPINS)
    work.wait()
    return values.sum().item()

def load_shard():
    time.sleep(SECONDS)

def evaluate():
    # In a group of its own: different collectives in one group have no defined result with NCCL.
    values = torch.ones(1 << 22, device=device)
    dist.broadcast(values, 0, evaluators)
    values.sum().item()

device = devices.join_group(120)
evaluators = dist.new_group([0, 1])
for group in (dist.group.WORLD, *[evaluators] * (devices.RANK < 2)):
    dist.all_reduce(torch.ones(4, device=device), group=group)
devices.finish()
# Without a GPU: a spin ends when the others may have come, or never.
SPINS = 10**9 if HOW in ("stuck", "elsewhere") else 200_000
SECONDS = 6 if HOW == "late" else 600
if devices.RANK == 1 and HOW in ("late", "stuck", "timeout"):
    print("sleeps", flush=True)
    load_shard()
    waited(torch.ones(1 << 22, device=device))
elif devices.RANK == 1 and HOW == "elsewhere":
    print("sleeps", flush=True)
    evaluate()
else:
    waited(torch.ones(1 << 22, device=device))
dist.barrier()
devices.finish()
print("done", HOW, flush=True)
"""
HANG_S = 3
VERDICTS = {
    "stuck": r"rank 1 \(.*\) sleeps \(load_shard, train\.py:\d+\)",
    "elsewhere": r"rank 1 \(.*\) waits in .*evaluate",
}


@pytest.mark.parametrize("how", VERDICTS)
def test_the_rank_that_hangs_is_named_although_the_others_spin(tmp_path: Path, how: str) -> None:
    script(tmp_path, HANGS)
    # Of two ranks in different collectives either could be wrong.
    with Job(tmp_path, "--nproc-per-node", "3", "--hang-timeout", str(HANG_S), "train.py", how, env=ENV) as job:
        job.wait_for_output("sleeps")
        began_s = time.monotonic()
        verdict = job.wait_for_output(r"^elaunch: the job seems to hang: (.*)$")
        took_s = time.monotonic() - began_s
        assert job.wait() == 0, job.output

    print(f"{how}: the verdict after {took_s:.1f} s with --hang-timeout {HANG_S}")
    assert re.match(VERDICTS[how], verdict[1]), f"the wrong rank is named: {verdict[1]}"
    assert job.stdout.count("done well") == 3


def test_a_rank_that_comes_late_is_no_hang(tmp_path: Path) -> None:
    script(tmp_path, HANGS)

    job = finished(tmp_path, "--nproc-per-node", "2", "--hang-timeout", str(HANG_S), "train.py", "late", env=ENV)

    assert job.code == 0, job.output
    assert "seems to hang" not in job.output, "a rank that was late was taken for one that hangs"
    assert job.stdout.count("done late") == 2


def test_a_collective_that_times_out_with_nobody_dead_is_the_cause_in_the_report(tmp_path: Path) -> None:
    script(tmp_path, HANGS.replace("join_group(120)", "join_group(8)"))
    options = ("--nproc-per-node", "2", "--hang-timeout", "0", "--max-restarts", "0", "train.py", "timeout")

    job = finished(tmp_path, *options, env={**ENV, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"})

    assert job.code != 0, job.output
    assert "Next step: one rank did not enter this collective" in job.stderr, "the report has another cause"


def test_stacks_show_where_each_rank_is_while_one_waits_for_the_other_on_its_gpu(tmp_path: Path) -> None:
    script(tmp_path, HANGS)
    options = ("--nproc-per-node", "2", "--hang-timeout", "0", "--run-id", "stuck", "train.py", "stuck")
    with Job(tmp_path, *options, env=ENV) as job:
        job.wait_for_output("sleeps")
        shown = finished(tmp_path, "stacks", "stuck")

    assert shown.code == 0, shown.output
    assert re.search(r"rank 0: waited \(train\.py:\d+\)", shown.stdout), shown.stdout
    assert re.search(r"rank 1: load_shard \(train\.py:\d+\)", shown.stdout), shown.stdout


SLOW = """
import time
import devices, torch, torch.distributed as dist
device = devices.join_group()
end = torch.zeros(1, device=device)
for _ in range(100_000):
    if devices.RANK == 1:
        time.sleep(0.02)
    dist.all_reduce(end)
    end.item()
"""
# The same command with a window of 30 samples, 20 a second.
QUICK = """
import sys
from elaunch.agent.diagnosis import collectives
from elaunch.agent.workers import group, observers
from elaunch.launcher.cli import main
collectives.WINDOW_SAMPLES, group._SAMPLE_S, observers._COUNT_EVERY_S = 30, 0.05, 0.05
sys.argv = ["elaunch", *sys.argv[4:]]
main()
"""


def test_the_rank_for_which_the_others_wait_on_their_gpus_is_named_as_slow(tmp_path: Path) -> None:
    script(tmp_path, SLOW)
    env = {**ENV, "TORCH_NCCL_ENABLE_TIMING": "1"}
    with Job(tmp_path, "--nproc-per-node", "2", "train.py", env=env, prefix=(sys.executable, "-c", QUICK)) as job:
        found = job.wait_for_output(r"rank (\d+) is slower than the other ranks of this node: .*$")

    assert found[1] == "1", "the rank that waits is named, not the one that it waits for"


TRAINER = f"""
import sys
sys.path.insert(0, {str(REPOSITORY / "tests" / "faults")!r})
import devices, killing_trainer
from elaunch.trainer import train
train.join = lambda _: devices.join_group()
killing_trainer.plant()
sys.exit(killing_trainer.main(sys.argv[2:]))
"""
STEPS = 20
# Four layers for a pipeline; workers that share one model draw dropout's masks of their own.
NETWORK = (
    "--steps",
    str(STEPS),
    "--micro-batch",
    "3",
    "--layers",
    "4",
    "--heads",
    "4",
    "--dropout",
    "0",
    "--lr",
    "3e-4",
)
LOSE_AT_MOST = 5


def trained(folder: Path, workers: int, *options: str, asks: tuple[str, ...] = ()) -> Training:
    """A run of the bundled trainer in `folder`; `asks` are the moments of tests/faults/moments.py."""
    run = Training(folder, asks)
    script(folder, TRAINER)
    _, *words = run.words(*NETWORK, *options)
    launch = ("--nproc-per-node", str(workers), "--log-dir", "logs", "train.py")
    job = finished(folder, *launch, *words, env=ENV)
    assert job.code == 0, job.output
    return run


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return trained(tmp_path_factory.mktemp("one") / "run", 1)


@pytest.mark.parametrize("plan", ["ddp", "zero1", "fsdp2", "tp=2", "pp=2"])
def test_each_plan_has_the_losses_of_one_process_although_a_rank_is_killed(
    tmp_path: Path, one_process: Training, plan: str
) -> None:
    options = ("--parallel", plan, "--lose-at-most", str(LOSE_AT_MOST), "--profile", "14-16")
    run = trained(tmp_path / "run", 2, *options, asks=("loss-0-9-1",))

    assert run.struck() == ["loss-0-9-1"]
    # With DDP the survivor has the whole state.
    lost_max = 0 if plan == "ddp" else LOSE_AT_MOST - 1
    assert 0 <= 8 - run.began(1) <= lost_max, "the kill costs more steps than --lose-at-most"
    # Sums of another order differ in the last bits.
    worst = run.difference(one_process)
    print(f"{plan}: largest relative difference of a loss: {worst:.2g}")
    assert worst < 1e-4
    (profile,) = (tmp_path / "run" / "logs").glob("latest/attempt_1/profile/profile.json")
    record = json.loads(profile.read_text())
    assert {each["rank"] for each in record["steps"]} == {0, 1}
    # NCCL's kernels on a GPU, gloo's calls without one.
    shares = [each["communication_s"] / each["seconds"] for each in record["steps"]]
    assert all(0 < share < 1 for share in shares), "the profile shows no communication"
    import torch

    if torch.cuda.is_available():
        assert record["gpu_busy"] > 0, "the profile shows no kernels"
