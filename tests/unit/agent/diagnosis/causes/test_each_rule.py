"""Each row of docs/failures.md has a message, as programs write it, that it is the first to recognise."""

from __future__ import annotations

import pytest

from elaunch.agent.diagnosis.causes.cause import Evidence, Facts, Space
from elaunch.agent.diagnosis.causes.table import RULES, _evidences
from elaunch.rendezvous.types import FailureKind
from tests.unit.agent.diagnosis.causes.test_table import EXCEPTIONS, raised

NO_SHM = Facts(shm=Space("/dev/shm", 64 << 20, 0))
ECC = Facts(gpu_errors=("Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",))
OLD = Facts(mismatch="the nodes have different software: torch 2.12 on node-b; torch 2.13 on node-a")
NCCL = "NCCL error in: x.cpp:94, "
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000)"
# What `EXCEPTIONS` does not have: facts of the host, exit codes, signals, and the rarer messages.
EXAMPLES = {
    "killed by the kernel's out-of-memory killer": Evidence(-9, killed=FailureKind.OUT_OF_MEMORY),
    "killed by a SIGKILL of an unknown sender": Evidence(-9, killed=FailureKind.SIGNAL),
    "memory error of Python": Evidence(1, "MemoryError"),
    "a DataLoader worker has too little shared memory": Evidence(
        1, "RuntimeError", "DataLoader worker (pid 9) is killed by signal: Bus error. ", facts=NO_SHM
    ),
    "a bus error from a small /dev/shm": Evidence(-7, facts=NO_SHM),
    "a GPU or its link is faulty (Xid)": Evidence(1, "RuntimeError", "CUDA error: unknown error", facts=ECC),
    "a failure between ranks, where the nodes have different versions of torch or Python": Evidence(
        1, "DistBackendError", f"{NCCL}invalid usage", facts=OLD
    ),
    "wrong arguments of the script": Evidence(2, words="train.py: error: unrecognized arguments: --lr0 0.1"),
    "a variable that is not set": Evidence(
        1, "KeyError", "'DATA_DIR'", traceback='File "<frozen os>", line 679, in __getitem__'
    ),
    "a command that cannot be executed": Evidence(126, words="elaunch: ./run.sh cannot be started: Permission denied"),
    "a command that is not found": Evidence(127, words="run.sh: line 3: trian: command not found"),
    "a crash in native code, with its Python stack": Evidence(-11, crash="/home/u/model.py:17 in forward"),
    "an instruction that this CPU does not have": Evidence(-4),
    "a thread of native code that still ran at the program's end": Evidence(
        -6, words="terminate called without an active exception"
    ),
    "the heap is corrupted": Evidence(-6, words="double free or corruption (out)"),
    "NCCL watchdog: a collective timed out": Evidence(-6, words=WATCHDOG),
    "the nodes have different versions of NCCL": Evidence(
        1, "DistBackendError", f"{NCCL}internal error\nmismatched NCCL versions 2.21 and 2.27"
    ),
    "NCCL: invalid usage": Evidence(1, "DistBackendError", f"{NCCL}invalid argument\nncclInvalidArgument"),
    "the ranks disagree about the model (DDP)": Evidence(
        1, "RuntimeError", "DDP expects same model across all ranks, but Rank 0 has 2 params."
    ),
}


def _title(evidence: Evidence) -> str:
    return next((rule.title for rule in RULES if rule.cause(evidence)), "")


@pytest.mark.parametrize("title", EXAMPLES)
def test_its_own_rule_is_the_first_that_recognises_it(title: str) -> None:
    assert _title(EXAMPLES[title]) == title


def test_each_rule_has_an_example() -> None:
    recognised = {
        _title(evidence) for error, words, _ in EXCEPTIONS for evidence in _evidences(raised(error, words), Facts())
    }

    assert {rule.title for rule in RULES} - recognised == set(EXAMPLES)
