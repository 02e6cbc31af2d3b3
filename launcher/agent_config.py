"""Builds the agent's configuration from the options and the host's resources, with notes to log about it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from elaunch.agent.config import AgentConfig, LogFormat, OnHang, OutputPlan, ProgramText, StreamChoice, Streams
from elaunch.agent.environment import DEFAULT_PRELOAD, RANK_VARIABLES
from elaunch.agent.guardian.guardian import VARIABLE
from elaunch.agent.linux import in_threads
from elaunch.agent.program_imports import program_text
from elaunch.agent.workers.topology import KINDS, nvlink_domain
from elaunch.launcher.errors import UsageError, nearest
from elaunch.launcher.host import HostResources
from elaunch.launcher.options.options import Options, Source
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.schedulers.detect import mark_of
from elaunch.launcher.schedulers.facts import Cluster, line
from elaunch.launcher.store.locate import Planned
from elaunch.rendezvous.format import plural
from elaunch.rendezvous.types import JobSpec, Program, ProgramKind

# The signals by which schedulers announce the end of a job.
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)

_NVML_S = 5.0
_VARIABLES = {name for option in TABLE for name in option.variables}
_COLOURS = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PYTHON_COLORS")

# torchrun puts this before each line under --tee. Scripts search for it.
_TEE_PREFIX = "[${role_name}${local_rank}]:"


def agent_config(options: Options, planned: Planned, environ: Mapping[str, str], host: HostResources) -> AgentConfig:
    """The agent's settings. The caller has given the job a name (`options.run_id`). Raises UsageError.

    If there are several nodes and no `master_addr` was given, each node finds its own (`host.own_address`).
    """
    assert options.run_id is not None
    cluster = planned.cluster
    index = cluster.node_index if cluster else None
    slots, counted = count_workers(options.nproc_per_node, host, cluster)
    _check_gpus(options, environ, slots)
    _check_own_gpus(options, host, cluster)
    environment, threads = worker_environment(environ, slots, host.cores)
    output = output_plan(options)
    shown = _for_terminal(options, output, slots, host.columns, environ)
    environment |= shown
    # SIGUSR1 and SIGUSR2 are notices by default: schedulers, even those that elaunch does not support, announce the
    # end of a job by one of them (`sbatch --signal=USR1@60`), some to all processes. The default action ends the agent.
    signals = tuple(dict.fromkeys(int(signal.Signals[name]) for name in options.signals_to_handle))
    notices = tuple(number for number in signals if number in _NOTICES)
    has_named = "signals_to_handle" in options.given
    may_reach_workers = cluster is not None and cluster.signals_workers
    interpreter = environ.get("PYTHON_EXEC") or host.python
    other_python: tuple[str, ...] = ()
    if interpreter != host.python and options.kind is not ProgramKind.COMMAND:
        other_python = (
            f"workers run PYTHON_EXEC={interpreter}, and each starts a new interpreter: nothing is preloaded for it",
        )
    preload, text = _preload(options, interpreter, host)
    warm_s, cannot = warm_seconds(options, preload, cluster, environment)
    accepted = [(f"--{each.long}", each.no_effect) for each in TABLE if each.no_effect and each.name in options.given]
    return AgentConfig(
        spec=JobSpec(
            run_id=options.run_id,
            program=Program(options.kind, options.target, options.args, interpreter, host.python_options),
            nodes_min=options.nnodes[0],
            nodes_max=options.nnodes[1],
            max_restarts=options.max_restarts,
            restart_window_s=options.restart_window,
            exclude_after=options.exclude_after,
            no_restart_codes=options.no_restart_codes,
        ),
        slots=slots,
        gpus=host.gpus,
        environment=environment,
        # Tracebacks stay without colours (Python 3.13): their text is searched. The fork server does not need this.
        worker_env={
            **({"PYTHON_COLORS": "0"} if "FORCE_COLOR" in shown else {}),
            **worker_env(options, signals),
            **mark_of(environ),
        },
        role=options.role,
        output=output,
        times=planned.plan.times,
        store_prefix=planned.plan.prefix,
        # The rank in a static rendezvous, else the scheduler's order, in which neighbours are near.
        node_rank=next((each for each in (planned.plan.node_rank, index) if each is not None), -1),
        signals=signals,
        notices=notices,
        has_named_signals=has_named,
        # Not by a command: a shell cannot trap a signal that was ignored at its start.
        ignored=notices if may_reach_workers and not has_named and options.kind is not ProgramKind.COMMAND else (),
        preload=preload,
        text=text,
        warm_s=warm_s,
        master_addr=planned.plan.own_addr or "127.0.0.1",
        master_ports=master_ports(options, planned),
        on_hang=options.on_hang,
        numa_binding=options.numa_binding,
        virtual_local_rank=options.virtual_local_rank,
        children_grace_s=options.children_grace,
        on_event=options.on_event or (),
        metrics=options.metrics_port,
        notes=(
            *_of_the_scheduler(options, cluster, slots, host),
            *planned.notes,
            *_without_effect(cannot),
            *other_python,
            *_misspelt_variables(environ),
        ),
        details=(
            *_chosen_defaults(options, cluster, counted, threads),
            *_without_effect((*planned.ignored, *accepted)),
        ),
    )


def topology_of(options: Options, planned: Planned) -> str:
    """This node's place in the network: the given one, else the scheduler's, else its GPUs' NVLink domain.

    Empty if it is unknown, or cannot matter: the ranks of a static rendezvous are given.
    """
    if planned.plan.node_rank is not None or options.nnodes[1] == 1:
        return ""
    known = options.topology or (planned.cluster.topology if planned.cluster else "")
    # A driver may hang.
    return known or in_threads({"": nvlink_domain}, _NVML_S, "elaunch-nvml").get("", "")


def count_workers(requested: int | str | None, host: HostResources, cluster: Cluster | None = None) -> tuple[int, str]:
    """The number of workers and its source, as "8 workers, one per GPU"; empty for a given number.

    Visible GPUs take precedence over the scheduler's number: the user may have hidden some.
    """
    if isinstance(requested, int):
        return requested, ""
    found, kind = host.kinds.get(requested or "", host.gpus), (requested if requested in KINDS else "gpu").upper()
    if requested in ("gpu", *KINDS) and found == 0:
        raise UsageError(
            f"--nproc-per-node {requested} finds no {kind} that this process may use; use cpu, or give a number"
        )
    if requested != "cpu" and found > 0:
        return found, f"{plural(found, 'worker')}, one per {kind}"
    if requested is None and cluster and cluster.workers:
        return cluster.workers, f"{plural(cluster.workers, 'worker')}, from {cluster.scheduler}"
    if requested is None:
        return 1, "1 worker, no GPU was found"
    return host.cpus, f"{plural(host.cpus, 'worker')}, one per CPU"


def _check_gpus(options: Options, environ: Mapping[str, str], slots: int) -> None:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if options.virtual_local_rank and visible is not None and len(visible.split(",")) < slots:
        raise UsageError(
            f"--virtual-local-rank needs a GPU for each of {slots} workers and CUDA_VISIBLE_DEVICES={visible} names"
            f" {len(visible.split(','))}; use --nproc-per-node {len(visible.split(','))}"
        )


def _check_own_gpus(options: Options, host: HostResources, cluster: Cluster | None) -> None:
    """Raises UsageError if this agent sees only one task's GPUs: the node's others would be idle."""
    if cluster is None or cluster.tasks == 1 or not cluster.gpus:
        return
    own = host.gpus or cluster.own_gpus or cluster.gpus
    if own >= cluster.gpus or (isinstance(options.nproc_per_node, int) and options.nproc_per_node <= own):
        return
    raise UsageError(
        f"{cluster.scheduler} gave this node {cluster.gpus} GPUs, and each of its {cluster.tasks} tasks sees only its"
        f" own, here {own}; {cluster.gpus_way_out}"
    )


def _of_the_scheduler(options: Options, cluster: Cluster | None, slots: int, host: HostResources) -> tuple[str, ...]:
    if cluster is None:
        return ()
    notes = [cluster.note] if cluster.note else []
    if cluster.node_index is not None and cluster.nodes is None and "nnodes" not in options.given:
        notes.append(
            f"a {cluster.scheduler} does not give its pods their count, so each is a job of its own; for one"
            " job of all of them set PET_NNODES to their count"
        )
    if slots > host.cores:
        more = f"; request more with {cluster.cores_option}" if cluster.cores_option else ""
        notes.append(f"{slots} workers share the {plural(host.cores, 'CPU core')} that this node's agent may use{more}")
    return tuple(notes)


def worker_environment(environ: Mapping[str, str], slots: int, cores: int) -> tuple[dict[str, str], int | None]:
    """The environment of the workers, and their OMP_NUM_THREADS if it was chosen here.

    torchrun gives each of several workers one thread; here they share the cores that this process may use.
    """
    # Variables that configured this job must not configure a launcher in a worker. A script may print its environment,
    # and only agents need the job's secret.
    own = {"ELAUNCH_TOKEN", *RANK_VARIABLES, *(name for name in _VARIABLES if name.startswith("PET_"))}
    environment = {name: value for name, value in environ.items() if name not in own}
    # torch's own default. With torchrun's 1 a failed collective is aborted, and seems finished to the GPU's stream.
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    if "OMP_NUM_THREADS" in environ:
        return environment, None
    threads = max(1, cores // slots)
    environment["OMP_NUM_THREADS"] = str(threads)
    return environment, threads


def _for_terminal(
    options: Options, output: OutputPlan, slots: int, columns: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The terminal's width and colours, for workers with a prefix, whose output is a pipe; {} without a terminal.

    tqdm reads its width when it is imported, and so in the fork server. The user's own variables are kept.
    """
    ranks = slots * options.nnodes[1]
    prefix = output.prefix_template or f"[{ranks - 1}] "
    # tqdm leaves the last column free.
    width = columns - len(prefix) - 1
    if ranks == 1 or width <= 0 or output.log_format is LogFormat.JSON or output.redirects:
        return {}
    bars = {"TQDM_NCOLS": environ.get("TQDM_NCOLS", str(width))}
    if output.log_dir or output.makes_log_dir or any(map(environ.get, _COLOURS)):
        return bars
    return {**bars, "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}


def worker_env(options: Options, signals: tuple[int, ...]) -> dict[str, str]:
    """The variables that options set for every worker; such an option has a row in the table and one here."""
    has_limit = "hang_timeout" in options.given and options.on_hang is not OnHang.OFF
    return {
        "TORCHELASTIC_RUN_ID": options.run_id or "",
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signal.Signals(number).name for number in signals),
        # The Keeper compares it with the process groups' timeouts.
        **({"ELAUNCH_HANG_TIMEOUT": f"{options.hang_timeout:g}"} if has_limit else {}),
        # When a debugger begins, and in which rank.
        **({"ELAUNCH_DEBUG": f"start {options.debug}"} if options.debug is not None else {}),
        **({"ELAUNCH_DEBUG": f"error {options.debug_on_error}"} if options.debug_on_error is not None else {}),
    }


def output_plan(options: Options) -> OutputPlan:
    """With a directory and no choice of streams, everything goes to files and to the console. Raises UsageError."""
    tee = options.tee
    if options.log_dir is not None and not {"redirects", "tee"} & set(options.given):
        tee = StreamChoice(Streams.BOTH)
    # `--log-dir /dev/null` gives no directory, and none is made then.
    makes_log_dir = "log_dir" not in options.given and bool(options.redirects or tee)
    return OutputPlan(
        log_dir=options.log_dir and options.log_dir.absolute(),
        makes_log_dir=makes_log_dir,
        redirects=options.redirects,
        tee=tee,
        console_local_ranks=options.local_ranks_filter,
        console_ranks=options.ranks_filter,
        # A debugger's prompt must come after them.
        show_all_tracebacks=options.verbose or options.debug_on_error is not None,
        duplicate_stdout_filters=options.duplicate_stdout_filters,
        duplicate_stderr_filters=options.duplicate_stderr_filters,
        log_format=options.log_format,
        log_bytes_max=options.log_max_size,
        least="debug" if options.verbose else "warning" if options.quiet else "info",
        prefix_template=options.log_line_prefix_template or (_TEE_PREFIX if "tee" in options.given else None),
    )


def master_ports(options: Options, planned: Planned) -> tuple[int, ...]:
    """The ports that MASTER_PORT may be on this node. An empty tuple allows any port.

    In a static rendezvous only node rank 0 has the port: another node on the same host could not reserve it too.
    """
    if planned.plan.node_rank not in (None, 0):
        return ()
    first, last = options.master_port or (planned.master_port, planned.master_port)
    return tuple(range(first, last + 1)) if first and last else ()


def _preload(options: Options, interpreter: str, host: HostResources) -> tuple[tuple[str, ...] | None, ProgramText]:
    """`AgentConfig.preload` and `AgentConfig.text`. The text is not read if the user names modules."""
    if options.no_preload or options.kind is ProgramKind.COMMAND or interpreter != host.python:
        return None, ProgramText()
    if options.preload is not None:
        return options.preload, ProgramText()
    return DEFAULT_PRELOAD, program_text(options.kind, options.target)


def warm_seconds(
    options: Options, preload: tuple[str, ...] | None, cluster: Cluster | None, environment: Mapping[str, str]
) -> tuple[float, tuple[tuple[str, str], ...]]:
    """How long a fork server stays for the next job, and why none stays although one was requested."""
    if not options.warm:
        return 0.0, ()
    reasons = {
        "nothing is preloaded": preload is None,
        "the script is read from stdin": options.kind is ProgramKind.SCRIPT and options.target == "-",
        "a scheduler's job leaves no process behind": cluster is not None,
        "a job inside a worker leaves no process behind": VARIABLE in environment,
        "elaunch is the container's first process, which ends with the job": os.getpid() == 1 or os.getppid() == 0,
    }
    why = next((why for why, is_so in reasons.items() if is_so), "")
    if not why:
        return 60 * options.warm, ()
    # A variable applies to all jobs of a shell, and most of them may be of another kind.
    return 0.0, () if options.given["warm"] is Source.ENVIRONMENT else (("--warm", why),)


def _chosen_defaults(options: Options, cluster: Cluster | None, counted: str, threads: int | None) -> tuple[str, ...]:
    """The scheduler's facts, and one sentence for all defaults that differ from torchrun's."""
    facts = [line(cluster)] if cluster else []
    parts = [counted] if counted else []
    if threads is not None:
        parts.append(f"OMP_NUM_THREADS={threads}")
    if options.max_restarts and "max_restarts" not in options.given:
        parts.append(f"max_restarts is {options.max_restarts} (torchrun's default is 0)")
    return (*facts, *(["; ".join(parts)] if parts else []))


def _without_effect(ignored: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """One sentence for all options without effect, each with the reason."""
    names_by_reason: dict[str, list[str]] = {}
    for name, why in ignored:
        names_by_reason.setdefault(why, []).append(name)
    parts = [f"{', '.join(names)} ({why})" for why, names in names_by_reason.items()]
    return (f"without effect here: {'; '.join(parts)}",) if parts else ()


def _misspelt_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A note for each PET_ variable that no option reads, if its name resembles one that is read.

    The value is not shown: it may be a secret (`PET_TOKEN`).
    """
    unknown = sorted(name for name in environ if name.startswith("PET_") and name not in _VARIABLES)
    # Compared without the prefix, which would make all of them similar.
    known = [name[4:] for name in _VARIABLES if name.startswith("PET_")]
    meant = {name: nearest(name[4:], known) for name in unknown}
    return tuple(
        f"{name} is set, and no option reads it; did you mean PET_{near}?" for name, near in meant.items() if near
    )
