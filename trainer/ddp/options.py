"""The options of DDP, and which of them contradict each other. It does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

# torch's PowerSGDState starts after 1000 steps, more than a short run has.
RANK, START = 1, 10
POWERSGD = ("powersgd", "batched-powersgd")
HOOKS = ("none", "fp16", "bf16", "quantised", *POWERSGD)
# Replicas that differ between two steps have no state that one survivor has whole (decision 054).
_DIFFERING = {
    "noop": "exchanges nothing, so each worker trains a model of its own, and no survivor of a failure has the state "
    "of the job; examples/ddp/hooks.py measures a step without exchange",
    "post-local-sgd": "lets the workers' models differ between two averages, so no survivor of a failure has the "
    "state of the job after each step; examples/ddp/local_sgd.py keeps the state after each average",
}
# How a user's own hook is named: a module and a function or class in it.
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class DdpError(Exception):
    """DDP cannot be made as asked: one sentence with the values and the way out."""


@dataclass(frozen=True)
class DdpOptions:
    """How gradients are exchanged. None leaves the choice to torch, or here to RANK and START.

    `bucket_mb` is in MiB. `hook` is one of HOOKS, or MODULE:NAME. `powersgd_start` is the number of steps that exchange
    whole gradients before PowerSGD begins.
    """

    hook: str = "none"
    powersgd_rank: int | None = None
    powersgd_start: int | None = None
    bucket_mb: float | None = None

    @property
    def is_powersgd(self) -> bool:
        return self.hook in POWERSGD

    @property
    def is_own_hook(self) -> bool:
        """Whether the hook is the user's own: MODULE:NAME."""
        return _OWN.fullmatch(self.hook) is not None

    def refusal(self) -> str:
        """Why the options cannot be meant, in one sentence; "" if they can."""
        if self.hook in _DIFFERING:
            return f"--comm-hook {self.hook} {_DIFFERING[self.hook]}"
        if self.hook not in HOOKS and not self.is_own_hook:
            return (
                f"--comm-hook {self.hook}: there is no such hook; there are {', '.join(HOOKS)}, and your own as "
                "MODULE:NAME"
            )
        if self.powersgd_rank is not None and not self.is_powersgd:
            return (
                f"--powersgd-rank {self.powersgd_rank} has a meaning with --comm-hook {' and '.join(POWERSGD)} only, "
                f"not with {self.hook}; leave it out"
            )
        return ""

    def given(self) -> list[str]:
        """The options that are not at their defaults, as on the command line."""
        words = {
            f"--comm-hook {self.hook}": self.hook != "none",
            "--powersgd-rank": self.powersgd_rank is not None,
            "--bucket-mb": self.bucket_mb is not None,
        }
        return [word for word, is_given in words.items() if is_given]
