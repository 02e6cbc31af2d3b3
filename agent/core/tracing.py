"""What lets py-spy look into the workers; pure."""

from __future__ import annotations

# What Yama's kernel.yama.ptrace_scope allows: 0 all of this user's, 1 children, and processes that allow it, as workers
# allow their agent, 2 only with CAP_SYS_PTRACE, 3 nothing until the host is booted again.
_ADMIN_ONLY, _NOBODY = 2, 3


def tracing_advice(scope: int | None) -> str:
    """What to do where the kernel denies it. `scope` is ptrace_scope, None without Yama."""
    if scope is not None and scope >= _NOBODY:
        return "kernel.yama.ptrace_scope is 3, which only a reboot ends: boot this host with 1"
    capability = "the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE; in a pod: securityContext.capabilities)"
    if scope == _ADMIN_ONLY:
        return f"sysctl kernel.yama.ptrace_scope=1 on this host, or give elaunch {capability}"
    return f"run elaunch as the workers' user; in a container, give it {capability}"
