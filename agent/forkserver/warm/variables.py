"""Which environment variables may be others than they were when a fork server imported."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elaunch.agent.environment import RANK_VARIABLES
from elaunch.agent.guardian.guardian import JOB_VARIABLES, VARIABLE

# Python, the dynamic linker, libc and BLAS read these when a process starts, or when they are loaded. Some names are
# put together while the process runs, so they are in no library as a whole.
_AT_START = ("PYTHON", "LD_", "LC_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_LOGS")
_NAMES_AT_START = {"HOME", "LANG", "LANGUAGE", "LOCPATH", "TZ", "TZDIR", "NLSPATH", "HOSTALIASES"}
# tqdm goes through the whole environment for these when it is imported.
_OF_TQDM = "TQDM_"
# These are in libraries that look them up whenever they need them.
_WHEN_USED = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TP_", "UCX_", "MASTER_")
_NAMES_WHEN_USED = {
    "CUDA_VISIBLE_DEVICES",
    "TMPDIR",
    "PATH",
    "TERM",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "COLUMNS",
    "LINES",
    "USER",
}
# The shell's path of the command. In a .pth file, this word is a name of Python.
_OF_THE_SHELL = "_"
# Each worker gets its own, or the guardian compares them (see condition.jobs).
_OF_A_JOB = RANK_VARIABLES | {VARIABLE, *JOB_VARIABLES}


@dataclass(frozen=True)
class Read:
    """What a fork server has read while it imported.

    `asked` are the variables that Python code looked up, `in_libraries` are names that loaded libraries hold,
    `start_up_text` is the text of the .pth files, which Python runs when it starts. tqdm looks for names of its own.
    """

    asked: Collection[str]
    in_libraries: Collection[str]
    start_up_text: str
    has_tqdm: bool

    def why(self, name: str) -> str:
        """How that variable may have been read; empty if it was not, or if its value then makes no difference."""
        if name in self.asked:
            return "which was read while importing"
        if name in _NAMES_AT_START or name.startswith(_AT_START) or (self.has_tqdm and name.startswith(_OF_TQDM)):
            return "which is read when a program starts"
        if name != _OF_THE_SHELL and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", self.start_up_text):
            return "which is in a .pth file"
        if name in self.in_libraries and name not in _NAMES_WHEN_USED and not name.startswith(_WHEN_USED):
            return "which a loaded library may have read"
        return ""


def read_before(then: Mapping[str, str], now: Mapping[str, str], read: Read) -> str:
    """A sentence about the first variable that differs and may have been read already; empty if none."""
    for name in sorted({*then, *now} - _OF_A_JOB):
        if then.get(name) != now.get(name) and (why := read.why(name)):
            return f"{name} {_change(then.get(name), now.get(name))}, {why}"
    return ""


def of_no_use(names: Collection[str], read: Read) -> set[str]:
    """Those of the variables that nothing can have read, so that a fork server which stays need not keep them."""
    return {
        name
        for name in {*names} - _OF_A_JOB - _NAMES_WHEN_USED
        if name not in read.in_libraries and not name.startswith(_WHEN_USED) and not read.why(name)
    }


def _change(then: str | None, now: str | None) -> str:
    """How a variable has changed, in words. Its value may be a secret, and is not among them."""
    if then is None:
        return "is set, and was not"
    return "is not set any more" if now is None else "has another value"
