"""launcher.schedulers: the facts from schedulers' variables, and their use together with the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.launcher.agent_config import agent_config, topology_of
from elaunch.launcher.errors import UsageError
from elaunch.launcher.host import HostResources
from elaunch.launcher.options.hostlist import expand
from elaunch.launcher.options.options import Options, parse
from elaunch.launcher.schedulers import detect as registry
from elaunch.launcher.schedulers.defaults import facts_of_job, resolve_head, settle
from elaunch.launcher.schedulers.facts import Cluster, port_of, port_of_name
from elaunch.launcher.store.locate import Planned, plan
from elaunch.rendezvous.endpoint import Endpoint
from tests.harness import REPOSITORY

# The variables of a task of `srun -N4 --ntasks-per-node=2`, as seen with Slurm 22.05.
SLURM = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node[0-3]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[0-3]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}
# The variables of a task of `flux run -N4 --tasks-per-node=1`, as seen with flux-core 0.88.0.
FLUX = {
    "FLUX_JOB_ID": "ƒEjrGHTb",
    "FLUX_JOB_ID_PATH": "/ƒEjrGHTb",
    "FLUX_JOB_NNODES": "4",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "0",
    "FLUX_TASK_RANK": "2",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
}
ONE_NODE_OF_FLUX = FLUX | {"FLUX_JOB_NNODES": "1", "FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-123@1",
}
CPU_HOST = HostResources(cpus=16, cores=8, gpus=0, python="/usr/bin/python3")
GPU_HOST = HostResources(cpus=16, cores=8, gpus=1, python="/usr/bin/python3")


def no_file(path: str) -> str:
    raise FileNotFoundError(path)


def detect(
    choice: str = "auto", hostname: str = "here", files: dict[str, str] | None = None, **environ: str
) -> Cluster:
    found = registry.detect(choice, environ, hostname, (files or {}).__getitem__ if files else no_file)
    assert found
    return found


def of_slurm(**changes: str) -> Cluster:
    return detect(**{name: value for name, value in {**SLURM, **changes}.items() if value})


def options_of(*argv: str, **environ: str) -> Options:
    return parse([*argv, "train.py"], environ)


def planned(cluster: Cluster, *argv: str, **environ: str) -> Planned:
    return plan(settle(options_of(*argv, **environ), cluster), environ, no_file, cluster)


# --- lists of hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[001-003,7],m2-[1-2]", ["n001", "n002", "n003", "n7", "m2-1", "m2-2"]),
        ("r[1-2]n[09-10]x,gpu-a", ["r1n09x", "r1n10x", "r2n09x", "r2n10x", "gpu-a"]),
    ],
)
def test_a_list_of_hosts_is_expanded_in_its_order(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


# --- Slurm


def test_a_task_of_srun_knows_its_job() -> None:
    found = of_slurm()

    assert found == Cluster(
        "Slurm",
        nodes=(4, 4),
        node_index=1,
        head="node0",
        head_port=port_of(77 * 7),
        workers=2,
        run_id="test-77.0",
        task=1,
        tasks=2,
        sources=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_NODEID"),
        signals_workers=True,
        head_query=found.head_query,
        cores_option="--cpus-per-task",
        gpus_way_out=found.gpus_way_out,
    )
    assert found.head_query
    assert found.head_query.command == ("scontrol", "--oneliner", "show", "node", "node0")


@pytest.mark.parametrize(
    ("address", "pattern", "switches"),
    [
        ("core.s[0-1].s3.node1", "switch.switch.switch.node", "core.s[0-1].s3"),
        (".ib-core.tors-r1.gpu027", "switch.switch.switch.node", "ib-core.tors-r1"),
        ("node1.example.org", "node", ""),
        ("", "", ""),
    ],
)
def test_the_topology_is_the_switches_above_the_node(address: str, pattern: str, switches: str) -> None:
    found = of_slurm(SLURM_TOPOLOGY_ADDR=address, SLURM_TOPOLOGY_ADDR_PATTERN=pattern)

    assert topology_of(options_of("--nnodes", "4"), planned(found)) == switches
    assert topology_of(options_of("--nnodes", "4", PET_TOPOLOGY="mine"), planned(found)) == "mine"
    assert topology_of(options_of("--topology", "mine"), planned(found)) == "", "there is one node"


def test_a_job_of_an_array_has_the_arrays_name_and_a_port_of_its_own() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "77"}
    found = [of_slurm(**array, SLURM_JOB_ID=str(78 + i), SLURM_ARRAY_TASK_ID=str(i)) for i in range(100)]

    assert found[3].run_id == "test-77_3.0"
    ports = {cluster.head_port for cluster in found if cluster.head_port}
    assert len(ports | {port + 1 for port in ports}) == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": ""},
        # An interactive step's.
        {"SLURM_STEP_ID": str(0xFFFF_FFFA)},
        # Submitted from within a step elsewhere, as was seen.
        {"SLURM_STEP_NODELIST": "other7"},
    ],
)
def test_the_shell_of_a_job_is_one_node_and_logs_it(changes: dict[str, str]) -> None:
    found = of_slurm(**changes)

    assert (found.nodes, found.node_index, found.tasks, found.run_id) == (None, None, 1, "test-77")
    assert (
        found.note == "this is the shell of Slurm's job 77, and its 4 nodes are not used: srun elaunch … starts on all"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_NODEID": "x"},
        {"SLURM_STEP_NODELIST": "n["},
        {"SLURM_STEP_NODELIST": "n[5-1]"},
        {"SLURM_STEP_TASKS_PER_NODE": "2x"},
    ],
)
def test_variables_that_make_no_sense_are_a_sentence(changes: dict[str, str]) -> None:
    ((name, _),) = changes.items()

    with pytest.raises(UsageError, match=f"{name}=.*--scheduler none"):
        of_slurm(**changes)


# --- Flux


def test_a_task_of_flux_run_knows_its_job_and_queries_the_head() -> None:
    found = detect(**FLUX)

    assert (found.scheduler, found.nodes, found.node_index, found.head) == ("Flux", (4, 4), 2, None)
    assert (found.run_id, found.head_port) == ("flux-EjrGHTb", port_of_name("flux-EjrGHTb"))
    assert (found.workers, found.task, found.tasks) == (None, 0, 1)
    assert found.head_query
    assert found.head_query.command == ("flux", "job", "info", "ƒEjrGHTb", "R")
    assert detect(**ONE_NODE_OF_FLUX).head_query is None


def test_where_flux_does_not_report_the_head_the_user_has_to() -> None:
    several, one = detect(**FLUX), detect(**ONE_NODE_OF_FLUX)

    with pytest.raises(UsageError, match=r"flux must be on the PATH of the job's tasks, or give --rdzv-endpoint"):
        facts_of_job(options_of(), several, {})
    assert facts_of_job(options_of("--rdzv-endpoint", "node0:2379"), several, {}) == several
    assert facts_of_job(options_of(), several, {"ELAUNCH_ENDPOINT": "etcd:2379"}) == several
    assert facts_of_job(options_of("--nnodes", "1"), several, {}) == several
    assert facts_of_job(options_of(), one, {}) == one
    assert facts_of_job(options_of(), replace(several, head="node0"), {}).head == "node0"


def test_flux_is_nearer_than_the_slurm_that_it_runs_in_and_mpirun_is_nearer_than_both() -> None:
    assert detect(**SLURM, **FLUX).scheduler == "Flux"
    assert detect(**SLURM, **FLUX, **OMPI).scheduler == "Open MPI"
    assert detect(**SLURM, **OMPI).head == "node0"


# --- the others


def test_processes_of_open_mpi_know_their_node_and_their_user_the_head() -> None:
    found = detect(**OMPI, MASTER_ADDR="host9")

    # By slot this is node 1, by node it would be another.
    assert (found.scheduler, found.nodes, found.node_index, found.head) == ("Open MPI", (2, 2), None, "host9")
    assert detect(**{**OMPI, "OMPI_COMM_WORLD_RANK": "0"}).node_index == 0
    assert (found.workers, found.task, found.tasks, found.run_id) == (4, 0, 4, "mpi-prterun-host-123-1")


@pytest.mark.parametrize("names", [("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")])
def test_hydra_and_pals_are_known(names: tuple[str, str]) -> None:
    found = detect(
        PMI_RANK="1",
        PMI_SIZE="2",
        PBS_NODEFILE="nodes",
        files={"nodes": "a\nb\n"},
        **dict(zip(names, "01", strict=True)),
    )

    assert (found.nodes, found.node_index, found.head, found.tasks) == ((2, 2), 1, "a", 1)


def test_lsf_knows_a_node_by_its_name() -> None:
    found = detect(LSB_JOBID="5", LSB_JOBINDEX="3", LSB_MCPU_HOSTS="h1 4 h2 4", hostname="h2.site")

    assert (found.scheduler, found.nodes, found.node_index, found.head) == ("LSF", (2, 2), 1, "h1")
    assert (found.run_id, found.note) == ("lsf-5_3", 'start it once on every host: blaunch -z "h1 h2" elaunch …')


def test_pbsdsh_takes_the_nodes_of_the_file() -> None:
    environ = {"PBS_JOBID": "12[3].server", "PBS_NODEFILE": "/aux/12", "PBS_TASKNUM": "3"}
    found = detect(hostname="b", files={"/aux/12": "a\na\nb\nb\n"}, **environ)

    assert (found.scheduler, found.nodes, found.node_index, found.head) == ("PBS", (2, 2), 1, "a")
    assert found.run_id == "pbs-12_3.server"
    assert "pbsdsh -u elaunch" in detect(files={"/aux/12": "a\nb\n"}, **{**environ, "PBS_TASKNUM": "1"}).note


def test_each_scheduler_can_be_named_and_is_on_its_page() -> None:
    page = (REPOSITORY / "docs" / "mpi.md").read_text()

    for name in registry.SCHEDULERS:
        assert options_of("--scheduler", name).scheduler == name
        assert f"`{name}`" in page
    with pytest.raises(UsageError, match=f"is not one of auto, none, {', '.join(registry.SCHEDULERS)}"):
        options_of("--scheduler", "slrum")


def test_the_scheduler_of_the_agent_did_not_start_what_its_worker_starts() -> None:
    config = agent_config(settle(options_of(), of_slurm()), planned(of_slurm()), SLURM, CPU_HOST)
    inside = {**config.environment, **config.worker_env}

    assert registry.detect("auto", inside, "here", no_file) is None
    assert detect("slurm", **inside).node_index == 1
    # `srun` inside the worker.
    assert detect(**{**inside, "SLURM_STEP_ID": "1"}).node_index == 1
    assert registry.mark_of({"PATH": "/bin"}) == {}


# --- beside the command line


def test_facts_fill_what_the_command_line_leaves_open() -> None:
    made = planned(of_slurm())

    assert made.plan.endpoints == (Endpoint("node0", port_of(77 * 7)),)
    assert (made.plan.is_head, made.plan.times.nodes_expected, made.has_derived_token) == (False, 4, True)
    assert planned(of_slurm(SLURM_NODEID="0")).plan.is_head
    assert settle(options_of(), of_slurm()).run_id == "test-77.0"


def test_the_command_line_wins() -> None:
    made = planned(of_slurm(), "--rdzv-endpoint", "etcd9:2379", "--nnodes", "2:3", ELAUNCH_TOKEN="a token of its user")

    assert made.plan.endpoints == (Endpoint("etcd9", 2379),)
    assert (made.plan.is_head, made.has_derived_token) == (None, False)
    options = settle(options_of("--nnodes", "2:3", "--run-id", "mine"), of_slurm())
    assert (options.nnodes, options.run_id) == ((2, 3), "mine")


@pytest.mark.parametrize(
    ("argv", "environ", "sentence"),
    [
        (
            ["--nnodes", "5"],
            {},
            r"--nnodes 5 contradicts Slurm, which started this job on 4 nodes, with 2 tasks .*5 nodes",
        ),
        ([], {"PET_NNODES": "9:9"}, r"PET_NNODES 9 contradicts Slurm"),
        (["--nnodes", "4", "--node-rank", "0"], {}, r"--node-rank 0 contradicts Slurm, where this is node 1"),
    ],
)
def test_a_contradiction_is_a_sentence(argv: list[str], environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        settle(options_of(*argv, **environ), of_slurm())


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--nnodes", "4", "--master-addr", "a", "--node-rank", "2"], {}),
        (["--nnodes", "1:4", "--rdzv-endpoint", "a:2379"], {}),
        (["--nnodes", "4"], {"ELAUNCH_ENDPOINT": "a:2379"}),
    ],
)
def test_a_job_of_several_steps_is_known_by_its_own_name(argv: list[str], environ: dict[str, str]) -> None:
    one_node = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node1", "SLURM_NODEID": "0"}
    options = options_of(*argv)

    cluster = facts_of_job(options, of_slurm(**one_node, SLURM_STEP_TASKS_PER_NODE="1"), environ)
    made = plan(settle(options, cluster), environ, no_file, cluster)

    assert settle(options, cluster).run_id is None
    assert (made.plan.times.nodes_expected, made.has_derived_token) == (0, False)
    assert "more nodes than Slurm started here" in cluster.note


def test_tasks_that_see_their_own_gpu_only_are_a_sentence() -> None:
    cluster = of_slurm(SLURM_GPUS_ON_NODE="2", CUDA_VISIBLE_DEVICES="0")

    for host in (CPU_HOST, GPU_HOST):
        with pytest.raises(
            UsageError, match=r"2 GPUs, and each of its 2 tasks sees only its own, here 1; .*--gpu-bind"
        ):
            agent_config(settle(options_of(), cluster), planned(cluster), {}, host)


def test_an_agent_has_its_place_and_takes_the_schedulers_notice() -> None:
    config = agent_config(settle(options_of(), of_slurm()), planned(of_slurm()), {}, CPU_HOST)

    assert (config.node_rank, config.slots) == (1, 2)
    assert config.notices == config.ignored == (10, 12)
    assert set(config.notices) < set(config.signals)
    assert not config.has_named_signals
    assert config.details[0].startswith("Slurm: ")
    assert config.notes == ()


@pytest.mark.parametrize(
    ("cluster", "argv", "notices", "ignored"),
    [
        # A shell could not undo it.
        (of_slurm(), ("--no-python",), (10, 12), ()),
        # Of mpirun each process gets it from its own; Flux signals the agent's process group alone.
        (detect(**OMPI, MASTER_ADDR="host9"), (), (10, 12), ()),
        (of_slurm(), ("--signals-to-handle", "SIGTERM,SIGUSR1"), (10,), ()),
    ],
)
def test_workers_ignore_a_notice_only_where_a_scheduler_sends_it_to_them_too(
    cluster: Cluster, argv: tuple[str, ...], notices: tuple[int, ...], ignored: tuple[int, ...]
) -> None:
    options = settle(options_of(*argv), cluster)

    config = agent_config(replace(options, run_id="test"), planned(cluster, *argv), {}, CPU_HOST)

    assert (config.notices, config.ignored) == (notices, ignored)
    assert set(notices) <= set(config.signals)
    assert config.has_named_signals == ("--signals-to-handle" in argv)


# --- the head's address


@pytest.mark.parametrize(
    ("head", "output", "found"),
    [
        ("localhost", "NodeAddr=10.0.0.9", "localhost"),
        ("n1.invalid", "NodeName=n1.invalid NodeAddr=127.0.0.5 NodeHostName=x", "127.0.0.5"),
        ("n1.invalid", "Node n1 not found", "n1.invalid"),
    ],
)
def test_a_head_whose_name_is_no_hosts_has_the_address_that_slurm_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, output: str, found: str
) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho {output}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "2"}
    cluster = detect("slurm", **slurm, SLURM_STEP_NODELIST=head)

    assert resolve_head(cluster).head == found


@pytest.mark.parametrize(
    ("script", "head"),
    [
        ("""echo '{"execution": {"nodelist": ["node[3-4]"]}}'""", "node3"),
        ("""echo '{"execution": {"nodelist": ["n["]}}'""", None),
        ("exit 1", None),
        (None, None),
    ],
)
def test_the_head_of_a_job_of_flux_is_queried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, head: str | None
) -> None:
    if script:
        (tmp_path / "flux").write_text(f"#!/bin/sh\n[ \"$*\" = 'job info f1 R' ] && {script}\n")
        (tmp_path / "flux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    task = {"FLUX_JOB_ID": "f1", "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2"}

    cluster = detect("flux", **task)
    assert resolve_head(cluster).head == head
