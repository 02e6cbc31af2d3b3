"""The configuration of a function's job, and the command-line options that it means."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

# torch's default. That of the command is shorter.
_JOIN_TIMEOUT_S = 900


@dataclass
class LaunchConfig:
    """How many workers there are, and where nodes meet: torch's fields in torch's order, with torch's defaults.

    docs/functions.md has each field's meaning here. `monitor_interval`, `start_method`, `metrics_cfg` and
    `event_log_handler` are accepted and have no effect. `options` is elaunch's own: further options of the command
    `elaunch`, as on its command line; they win.

    Source: torch/distributed/launcher/api.py.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        self.rdzv_configs.setdefault("timeout", _JOIN_TIMEOUT_S)
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        elif self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout is {self.shutdown_timeout} and is a number of seconds; give 0 or more")


def as_ours(config: Any) -> LaunchConfig:
    """A configuration of torch's own as one of these. An older torch's lacks fields, which have their defaults then."""
    return LaunchConfig(
        **{each.name: getattr(config, each.name) for each in fields(LaunchConfig) if hasattr(config, each.name)}
    )


def option_words(config: LaunchConfig) -> list[str]:
    """The options of the command `elaunch` that `config` means."""
    words = [
        f"--nnodes={config.min_nodes}:{config.max_nodes}",
        f"--nproc-per-node={config.nproc_per_node}",
        f"--max-restarts={config.max_restarts}",
        f"--stop-grace={config.shutdown_timeout}",
        # Each call starts the workers of its own node, also where a scheduler would have it otherwise.
        "--scheduler=none",
    ]
    given = {
        "run-id": config.run_id,
        "role": config.role,
        "signals-to-handle": config.signals_to_handle,
        "local-addr": config.local_addr,
        "duplicate-stdout-filters": ",".join(config.duplicate_stdout_filters or ()),
        "duplicate-stderr-filters": ",".join(config.duplicate_stderr_filters or ()),
        "numa-binding": config.numa_options and config.numa_options.affinity_mode.value,
    }
    words += [f"--{name}={value}" for name, value in given.items() if value]
    if config.virtual_local_rank:
        words.append("--virtual-local-rank")
    return [*words, *_rendezvous(config), *_logs(config.logs_specs), *config.options]


def _rendezvous(config: LaunchConfig) -> Iterator[str]:
    is_static = config.rdzv_backend == "static"
    if config.max_nodes == 1 and not is_static:
        # One node has nobody to meet. Of a static job the endpoint is also MASTER_ADDR and MASTER_PORT.
        return
    settings = dict(config.rdzv_configs)
    if "join_timeout" in settings:
        # torch's c10d reads this one; the other is always there.
        settings.pop("timeout", None)
    node_rank = settings.pop("rank", None)
    yield f"--rdzv-backend={config.rdzv_backend}"
    if config.rdzv_endpoint:
        yield f"--rdzv-endpoint={config.rdzv_endpoint}"
    if is_static and node_rank is not None:
        yield f"--node-rank={node_rank}"
    if config.max_nodes > 1:
        yield f"--rdzv-conf={','.join(f'{name}={value}' for name, value in settings.items())}"


def _logs(specs: Any) -> Iterator[str]:
    """The options that torch's `LogsSpecs` means. It has no public names for what it was given."""
    redirects, tee = (getattr(specs, name, None) for name in ("_redirects", "_tee"))
    if redirects or tee:
        if specs.root_log_dir and specs.root_log_dir != os.devnull:
            yield f"--log-dir={specs.root_log_dir}"
        yield f"--redirects={_streams(redirects or 0)}"
        yield f"--tee={_streams(tee or 0)}"
    if shown := getattr(specs, "_local_ranks_filter", None):
        yield f"--local-ranks-filter={','.join(str(rank) for rank in sorted(shown))}"


def _streams(choice: int | Mapping[int, int]) -> str:
    if isinstance(choice, Mapping):
        return ",".join(f"{rank}:{int(streams)}" for rank, streams in sorted(choice.items()))
    return str(int(choice))
