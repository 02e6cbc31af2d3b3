"""One entry of the list."""

from __future__ import annotations

from dataclasses import dataclass

from tests.conformance.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """Something of torchrun's that a program, or a script around it, may rely on.

    `differs` says what elaunch does otherwise, and is empty where nothing is. `trials` run for torchrun and, unless
    `proofs` name tests that prove the behaviour of elaunch already, in the fast suite for elaunch. A trial may belong
    to several behaviours.
    """

    number: int
    fact: str
    trials: tuple[Trial, ...]
    differs: str = ""
    proofs: tuple[str, ...] = ()
