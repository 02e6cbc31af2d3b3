"""How DDP sends gradients: the settings that tuning chooses among. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

# DDP's hooks that change gradients, in the order in which they are tried.
LOSSY_HOOKS = ("bf16", "fp16", "powersgd")
HOOKS = ("none", *LOSSY_HOOKS)


@dataclass(frozen=True)
class CommSettings:
    """DDP's buckets and its communication hook. The defaults are those of DDP.

    Sizes are in MiB, as DDP's `bucket_cap_mb`. The first bucket is the one whose gradients are complete first. `hook`
    is one of HOOKS.
    """

    bucket_mb: float = 25.0
    first_bucket_mb: float = 1.0
    bucket_view: bool = False
    hook: str = "none"

    @property
    def is_lossy(self) -> bool:
        """Whether the hook rounds gradients."""
        return self.hook != "none"

    @property
    def words(self) -> str:
        """For people, as `buckets of 5 MiB, gradients as views of them, hook bf16`."""
        parts = [f"buckets of {self.bucket_mb:g} MiB"]
        parts += ["gradients as views of them"] * self.bucket_view
        parts += [f"hook {self.hook}"] * self.is_lossy
        return ", ".join(parts)


FIELDS = tuple(field.name for field in fields(CommSettings))
