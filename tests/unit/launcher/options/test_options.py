"""parse and agent_config: what a command line means, held against torchrun's parser where the meaning is torchrun's."""

from __future__ import annotations

import dataclasses
import re
import runpy
import signal

import click
import pytest

from elaunch.agent.config import AgentConfig, OnHang, StreamChoice, Streams
from elaunch.launcher.agent_config import RANK_VARIABLES, agent_config
from elaunch.launcher.host import HostResources
from elaunch.launcher.options.command_line import Group
from elaunch.launcher.options.options import Options, UsageError, help_text, parse
from elaunch.launcher.options.rdzv_conf import SETTINGS
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.options.values import Address, endpoints
from elaunch.launcher.preflight import read_secret
from elaunch.launcher.store.locate import plan
from elaunch.rendezvous.types import ProgramKind
from tests.harness import REPOSITORY

GPU_HOST = HostResources(cpus=128, cores=64, gpus=8, python="/usr/bin/python3")
CPU_HOST = HostResources(cpus=16, cores=8, gpus=0, python="/usr/bin/python3")
MIXED_HOST = dataclasses.replace(CPU_HOST, gpus=2, kinds={"xpu": 4, "npu": 2, "hpu": 0})


def options_of(*argv: str, **environ: str) -> Options:
    return parse(argv, environ)


def config_of(*argv: str, host: HostResources = CPU_HOST, **environ: str) -> AgentConfig:
    options = options_of(*argv, **environ)
    planned = plan(options, environ, read_secret)
    return agent_config(dataclasses.replace(options, run_id=options.run_id or "fresh"), planned, environ, host)


def sentence_of(*argv: str, host: HostResources = CPU_HOST, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        config_of(*argv, host=host, **environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argv", "environ", "has_colours"),
    [
        (("--nproc-per-node", "2"), {}, True),
        (("--nproc-per-node", "2"), {"CLICOLOR": "0"}, False),
        (("--nproc-per-node", "1"), {}, False),
        (("--nproc-per-node", "2", "-t", "3"), {}, False),
    ],
)
def test_workers_write_in_colour_where_ranks_share_a_terminal_and_nothing_goes_to_files(
    argv: tuple[str, ...], environ: dict[str, str], has_colours: bool
) -> None:
    on_terminal = config_of(*argv, "t.py", host=dataclasses.replace(CPU_HOST, columns=100), **environ)
    in_pipe = config_of(*argv, "t.py", **environ)

    expected = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"} if has_colours else {}
    assert {name: value for name, value in on_terminal.environment.items() if name in expected} == expected
    assert ("FORCE_COLOR" in on_terminal.environment) is has_colours
    assert ("PYTHON_COLORS" in on_terminal.worker_env) is has_colours
    assert "FORCE_COLOR" not in in_pipe.environment


# --- forms of the command


@pytest.mark.parametrize(
    ("argv", "kind", "target", "args"),
    [
        (["train.py", "--nnodes", "9"], ProgramKind.SCRIPT, "train.py", ("--nnodes", "9")),
        (["train.py", "-m"], ProgramKind.SCRIPT, "train.py", ("-m",)),
        (["-m", "pkg.mod", "-r", "3"], ProgramKind.MODULE, "pkg.mod", ("-r", "3")),
        (["--no_python", "bash", "-c", "x"], ProgramKind.COMMAND, "bash", ("-c", "x")),
        (["--run-path", "--no-python", "/a/t.py"], ProgramKind.SCRIPT, "/a/t.py", ()),
    ],
)
def test_the_program_and_its_arguments_are_found(
    argv: list[str], kind: ProgramKind, target: str, args: tuple[str, ...]
) -> None:
    options = options_of(*argv)

    assert (options.kind, options.target, options.args) == (kind, target, args)


def test_help_and_version_are_texts_and_not_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, text in ((["--version"], "elaunch 0.1.0"), (["--nproc", "2", "-h"], help_text())):
        with pytest.raises(click.exceptions.Exit):
            parse(argv, {})
        assert capsys.readouterr().out.rstrip() == text
    assert options_of("t.py", "--help").args == ("--help",)


def test_help_has_one_line_of_at_most_100_columns_for_each_option() -> None:
    lines = help_text().splitlines()

    assert max(len(line) for line in lines) <= 100
    for spec in TABLE:
        own = [line for line in lines if line.startswith("  -") and re.search(rf"--{spec.long} ", f"{line} ")]
        assert len(own) == 1, spec.long
        assert spec.help in own[0]
        # An option with a value shows its default.
        assert own[0].endswith("]") == bool((spec.metavar and spec.group is not Group.ACCEPTED) or spec.long == "warm")
    for setting in SETTINGS:
        # A newcomer has no pages at hand.
        assert any(f"  {', '.join(setting.names)} " in line for line in lines) != bool(setting.no_effect)
    assert [line[:-1] for line in lines if line[:-1] in {group.value for group in Group}] == [g.value for g in Group]


# --- one table


def test_help_has_every_exit_code_of_the_page_about_them() -> None:
    page = (REPOSITORY / "docs" / "exit-codes.md").read_text()

    codes = re.findall(r"^\| ([0-9]+|128 \+ N) \|", page, re.MULTILINE)
    assert len(codes) >= 5
    for code in codes:
        assert re.search(rf"[:, \n]{re.escape(code)}\s", help_text()), code


def test_every_option_of_torchrun_is_accepted_with_its_own_value_and_default_or_a_documented_difference() -> None:
    from torch.distributed.run import parse_args

    theirs = parse_args(["t.py"])  # type: ignore[no-untyped-call]
    ours = options_of("t.py")
    names = {spec.peer: spec for spec in TABLE if spec.peer and spec.peer != "help"}
    differs = runpy.run_path(str(REPOSITORY / "docs/record/options.py"))["DIFFERS"]

    # The last two are from torch 2.14 on. elaunch has the first of them with any torch.
    others = {"training_script", "training_script_args", "log_line_prefix_template", "print_completion"}
    assert {name.replace("-", "_") for name in names} == set(vars(theirs)) - others
    for name, spec in names.items():
        value = getattr(theirs, name.replace("-", "_"))
        if value == getattr(ours, spec.name) or spec.long in differs or spec.no_effect:
            continue
        # The meaning is the same in another type: elaunch's value was made from the text that torchrun keeps.
        default = (
            getattr(options_of(f"--{name}={value}", "t.py"), spec.name) if isinstance(value, str) else tuple(value)
        )
        assert default == getattr(ours, spec.name), name


# --- the environment


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("true", True), ("False", False)])
def test_a_switch_is_read_from_its_variable(value: str, expected: bool) -> None:
    assert options_of("t.py", PET_STANDALONE=value).standalone is expected


def test_every_option_is_read_from_its_variable_and_the_command_line_wins() -> None:
    options = options_of("--nproc_per_node", "4", "t.py", PET_NPROC_PER_NODE="2", PET_RDZV_ID="job-1", PET_NNODES="1:1")

    assert (options.nproc_per_node, options.run_id, options.nnodes) == (4, "job-1", (1, 1))
    for spec in TABLE:
        assert spec.variables[0] == f"PET_{spec.name.upper()}"


def test_the_shutdown_timeout_comes_from_the_option_its_variables_or_is_30_s() -> None:
    assert config_of("t.py").times.stop_grace_s == 30
    assert config_of("t.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").times.stop_grace_s == 7
    assert config_of("t.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7", PET_SHUTDOWN_TIMEOUT="8").times.stop_grace_s == 8
    assert config_of("--shutdown-timeout", "0", "t.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").times.stop_grace_s == 0
    assert sentence_of("--stop-grace", "-1", "t.py") == "--stop-grace -1 is not a number of seconds; give 0 or more"
    assert sentence_of("t.py", PET_STOP_GRACE="x") == "PET_STOP_GRACE=x is not a number of seconds; give 0 or more"


# --- values


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--nnodes", "2:3:4"], " is neither a number of nodes nor a range; use N or MIN:MAX with 1 <= MIN <= MAX"),
        (["--nnodes", "4:2"], " is neither a number of nodes nor a range; use N or MIN:MAX with 1 <= MIN <= MAX"),
        (["--rdzv-endpoint", "a:b"], " is not an endpoint; use HOST:PORT, [IPV6]:PORT or https://HOST:PORT, several"),
        (["--node-rank", "1"], " is out of range: the nodes' ranks are 0 to 0"),
        (["--nproc-per-node", "tpu"], " is neither a number nor a known resource; use gpu, cpu, xpu, npu, hpu or auto"),
        (["--nproc-per-node", "xpu"], " finds no XPU that this process may use; use cpu, or give a number"),
        (["--topology", "rack\t3"], " has characters that cannot be shown; use letters, digits and punctuation"),
        (["--nproc-per-node", "gpu"], " finds no GPU that this process may use; use cpu, or give a number"),
        (["--restart-window", "0"], " is not a length of time; give more than 0 seconds"),
        (["--no-restart-codes", "93,256"], " is not a list of exit codes; use numbers from 1 to 255, as in 93,94"),
        (["--log-max-size", "900K"], " is not a size of 1M or more; give a number with M or G, as in 100M"),
        (["--failure-grace", "nan"], " is not a number of seconds; give 0 or more"),
        (["--tee", "0:3,x"], " does not choose streams; use 0, 1, 2 or 3, or LOCAL_RANK:VALUE,… as in 0:3,12:1"),
        (["--master-port", "9:3"], " is not a range of ports; use FIRST:LAST with 1 <= FIRST <= LAST <= 65535"),
        (["--rdzv-conf", "a"], " is not a list of settings; use KEY=VALUE,KEY=VALUE"),
        (["--signals-to-handle", "SIGKILL"], " names SIGKILL, not a signal that a process can handle; the usual"),
        (["--module", "--no-python"], "contradicts --no-python: a module always runs in Python; drop one of them"),
        (["--hosts", "a", "--hostfile", "b"], "--hosts a contradicts --hostfile b: drop one of them"),
        (["--role", f"{'x' * 63}=1"], " is too long (65 bytes); give at most 64"),
        (["--role", "ps=1,trainer=9999999"], " is more workers than"),
        (["--nproc-per-node", "2", "--role", "ps=1"], " contradicts --role ps=1, which is 1 worker"),
        (["--standalone", "--nnodes", "2"], "contradicts --nnodes 2: a standalone job has one node; drop one of them"),
        (["--debug", "0", "--debug-on-error", "0"], " contradicts --debug-on-error 0: an attached IDE stops at"),
    ],
)
def test_a_wrong_request_is_one_sentence_with_its_values_and_the_way_out(argv: list[str], sentence: str) -> None:
    message = sentence_of(*argv, "t.py")

    assert message.startswith(argv[0])
    assert sentence in message


def test_of_two_contradicting_options_the_stronger_source_stays() -> None:
    assert config_of("--no-python", "prog", PET_MODULE="1").spec.program.kind is ProgramKind.COMMAND
    assert options_of("--standalone", "t.py", PET_NNODES="2").nnodes == (1, 1)
    assert options_of("--standalone", "--nnodes", "1:4", "t.py").nnodes == (1, 1), "no second node can come"
    assert not options_of("--nnodes", "2", "t.py", PET_STANDALONE="1").standalone
    debugged = options_of("--debug", "1", "--nnodes", "2", "--max-restarts", "2", "t.py", PET_ON_HANG="restart")
    assert (debugged.max_restarts, debugged.hang_timeout, debugged.on_hang) == (0, 0, OnHang.OFF)
    far = ("--max-restarts", "0", "--nnodes", "2", "--rdzv-endpoint", "a")
    config = config_of("--debug-on-error", "5", *far, "t.py")
    # No traceback may come late, into the debugger's prompt.
    assert (config.worker_env["ELAUNCH_DEBUG"], config.output.show_all_tracebacks) == ("error 5", True)


@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:3", "0:3,1:0,2:1,3:2"])
def test_streams_mean_what_they_mean_to_torchrun(text: str) -> None:
    from torch.distributed.elastic.multiprocessing.api import Std, to_map

    theirs = to_map(Std.from_str(text), 8)
    ours = options_of("-r", text, "t.py").redirects

    assert {rank: int(std) for rank, std in theirs.items()} == {rank: int(ours.of(rank)) for rank in range(8)}


# --- the job


@pytest.mark.parametrize(
    ("requested", "host", "slots"),
    [
        ([], GPU_HOST, 8),
        ([], CPU_HOST, 1),
        (["--nproc-per-node", "3"], GPU_HOST, 3),
        (["--nproc-per-node", "gpu"], GPU_HOST, 8),
        (["--nproc-per-node", "cpu"], GPU_HOST, 128),
        (["--nproc-per-node", "auto"], CPU_HOST, 16),
        (["--nproc-per-node", "auto"], MIXED_HOST, 2),
        (["--nproc-per-node", "xpu"], MIXED_HOST, 4),
    ],
)
def test_workers_are_counted_as_requested(requested: list[str], host: HostResources, slots: int) -> None:
    assert config_of(*requested, "t.py", host=host).slots == slots


def test_a_chosen_number_of_threads_is_kept_and_a_single_worker_gets_all_cores() -> None:
    assert config_of("t.py", host=GPU_HOST, OMP_NUM_THREADS="5").environment["OMP_NUM_THREADS"] == "5"
    assert config_of("--nproc", "1", "t.py", host=GPU_HOST).environment["OMP_NUM_THREADS"] == "64"
    assert config_of("--nproc", "5", "t.py", host=GPU_HOST).environment["OMP_NUM_THREADS"] == "12"


def test_workers_inherit_the_environment_without_the_variables_of_an_outer_launcher() -> None:
    outer = dict.fromkeys((*RANK_VARIABLES, "PET_ROLE"), "9") | {"A": "b", "CUDA_VISIBLE_DEVICES": "3"}
    options = dataclasses.replace(options_of("t.py"), run_id="x")

    environment = agent_config(options, plan(options, {}, read_secret), outer, CPU_HOST).environment

    assert not {*RANK_VARIABLES, "PET_ROLE"} & set(environment)
    assert (environment["A"], environment["CUDA_VISIBLE_DEVICES"]) == ("b", "3")
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    kept = config_of("t.py", TORCH_NCCL_ASYNC_ERROR_HANDLING="1").environment
    assert kept["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_what_options_set_for_all_workers_is_one_map() -> None:
    config = config_of("--run-id", "a", "--max-restarts", "5", "t.py")

    assert config.worker_env == {
        "TORCHELASTIC_RUN_ID": "a",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
    }
    assert config_of("--hang-timeout", "90", "t.py").worker_env["ELAUNCH_HANG_TIMEOUT"] == "90"


def test_a_given_master_port_is_the_port_and_none_is_a_fresh_one() -> None:
    assert config_of("t.py").master_ports == ()
    assert config_of("--master-port", "0", "t.py").master_ports == ()
    assert config_of("--standalone", "--master_port", "29511", "t.py").master_ports == (29511,)
    assert config_of("--master-port", "5000:5002", "t.py").master_ports == (5000, 5001, 5002)


def test_a_standalone_job_has_a_name_of_its_own() -> None:
    assert options_of("--rdzv-id", "x", "t.py").run_id == "x"
    assert options_of("--rdzv-id", "x", "--standalone", "t.py").run_id is None
    assert options_of("t.py").run_id is None


def test_several_nodes_have_their_number_and_their_ranks() -> None:
    config = config_of("--nnodes", "2:4", "--rdzv-endpoint", "node-a:2379", "t.py")
    static = config_of("--nnodes", "4", "--node-rank", "3", "--master-addr", "node-a", "--local-addr", "b", "t.py")

    assert (config.spec.nodes_min, config.spec.nodes_max, config.node_rank) == (2, 4, -1)
    assert (static.node_rank, static.master_addr) == (3, "b")
    first = config_of("--nnodes", "4", "--node-rank", "0", "--master-addr", "node-a", "--local-addr", "b", "t.py")
    assert first.master_addr == "node-a"


def test_the_jobs_secret_is_not_for_its_workers() -> None:
    config = config_of("--nnodes", "2", "--rdzv-endpoint", "a", "t.py", ELAUNCH_TOKEN="hush")

    assert "ELAUNCH_TOKEN" not in config.environment
    assert "hush" not in repr(config)


def test_signals_are_numbers() -> None:
    config = config_of("--signals-to-handle", "SIGTERM,SIGUSR1,SIGTERM,SIGCLD", "t.py")

    assert config.signals == (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
    usual = config_of("t.py")
    notices = (signal.SIGUSR1, signal.SIGUSR2)
    assert usual.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *notices)
    # Workers without a handler for a notice get SIGTERM instead.
    assert (usual.notices, usual.ignored, usual.has_named_signals) == (notices, (), False)


def test_a_log_directory_alone_tees_everything() -> None:
    assert config_of("--log-dir", "logs", "t.py").output.tee == StreamChoice(Streams.BOTH)
    assert config_of("--log-dir", "logs", "-r", "1", "t.py").output.tee == StreamChoice()
    assert config_of("t.py").output.tee == StreamChoice()
    null = config_of("--log-dir", "/dev/null", "t.py").output
    assert (null.log_dir, null.tee) == (None, StreamChoice())


@pytest.mark.parametrize(
    ("argv", "action", "idle_s", "reports_s"),
    [
        ((), OnHang.WARN, 60, 0),
        (("--hang-timeout", "20"), OnHang.RESTART, 20, 20),
        (("--hang-after", "20"), OnHang.RESTART, 20, 20),
        (("--on-hang", "off"), OnHang.OFF, 0, 0),
        (("--hang-timeout", "20", "--on-hang", "warn"), OnHang.WARN, 20, 20),
        (("--on-hang", "restart"), OnHang.RESTART, 60, 0),
        (("--hang-timeout", "0"), OnHang.OFF, 0, 0),
    ],
)
def test_one_limit_and_one_action_are_for_both_ways_to_see_a_hang(
    argv: tuple[str, ...], action: OnHang, idle_s: float, reports_s: float
) -> None:
    config = config_of(*argv, "t.py")

    assert (config.on_hang, config.times.hang_after_s, config.times.hang_timeout_s) == (action, idle_s, reports_s)
    assert ("ELAUNCH_HANG_TIMEOUT" in config.worker_env) is bool(reports_s)


# --- notes


def test_defaults_that_differ_from_torchruns_are_one_detail_and_no_note() -> None:
    config = config_of("t.py", host=GPU_HOST)

    assert (config.notes, config.details) == (
        (),
        ("8 workers, one per GPU; OMP_NUM_THREADS=8; max_restarts is 3 (torchrun's default is 0)",),
    )


def test_options_without_effect_are_one_detail() -> None:
    chosen = ("--nproc", "1", "--max-restarts", "0")
    ignored = ("--monitor-interval", "5", "--logs-specs", "x", "--rdzv-backend", "c10d", "--rdzv-conf", "a=b")

    assert config_of(*chosen, *ignored, "t.py", OMP_NUM_THREADS="1").details == (
        "without effect here: --rdzv-backend, --rdzv-conf (one node needs no rendezvous);"
        " --monitor-interval (exits are events, nothing is polled); --logs-specs (there are no log plug-ins)",
    )


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--no-preload", "t.py"), "nothing is preloaded"),
        (("-",), "the script is read from stdin"),
    ],
)
def test_a_warm_start_that_cannot_be_is_reported_where_it_was_requested(argv: tuple[str, ...], why: str) -> None:
    chosen = ("--nproc", "1", "--max-restarts", "0")
    requested = config_of(*chosen, "--warm", *argv, OMP_NUM_THREADS="1")
    set_for_all = config_of(*chosen, *argv, OMP_NUM_THREADS="1", ELAUNCH_WARM="15")

    assert requested.notes == (f"without effect here: --warm ({why})",)
    assert set_for_all.notes == ()
    assert requested.warm_s == set_for_all.warm_s == 0


def test_the_word_after_warm_is_the_script() -> None:
    options = options_of("--warm", "30")

    assert (options.target, options.warm) == ("30", 15.0)
    sentence = "PET_WARM=soon is not a number of minutes; give 0 or more, as in ELAUNCH_WARM=15"
    assert sentence_of("t.py", PET_WARM="soon") == sentence


def test_a_misspelt_variable_is_named_with_the_one_that_is_meant() -> None:
    chosen = ("--nproc", "1", "--max-restarts", "0", "t.py")
    foreign = {"PET_QQQ": "1", "PET_STANDALONE": "1", "MAX_RESTART": "2"}

    notes = config_of(*chosen, OMP_NUM_THREADS="1", PET_MAX_RESTART="hush", **foreign).notes

    assert notes == ("PET_MAX_RESTART is set, and no option reads it; did you mean PET_MAX_RESTARTS?",)


@pytest.mark.parametrize(("option", "longest"), [("--run-id", 255), ("--rdzv-id", 255), ("--role", 64)])
def test_a_name_that_is_part_of_keys_has_a_longest_length(option: str, longest: int) -> None:
    parse([option, "é" * (longest // 2), "train.py"], {})
    with pytest.raises(UsageError, match=rf"is too long \({longest + 1} bytes\); give at most {longest}") as raised:
        parse([option, "x" * (longest + 1), "train.py"], {})
    assert len(str(raised.value)) < 300


# --- roles


def test_the_numbers_of_the_roles_make_the_number_of_workers() -> None:
    config = config_of("--role", "ps=1, trainer=3", "t.py", host=GPU_HOST)

    assert (config.role, config.slots) == ("ps=1,trainer=3", 4)
    assert config_of("--role", "ps=1,trainer=3", "--nproc-per-node", "4", "t.py").slots == 4
    assert config_of("--role", "ps=1,trainer=3", "t.py", PET_NPROC_PER_NODE="8").slots == 4
    assert config_of("--role", "ps=1,ps=3", "t.py").slots == 1, "a name, as in torchrun"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host0", Address("", "host0", None)),
        ("host0:2379", Address("", "host0", 2379)),
        ("[::1]:2379", Address("", "::1", 2379)),
        ("[fe80::1%eth0]", Address("", "fe80::1%eth0", None)),
        ("fd91::1:80", Address("", "fd91::1:80", None)),
        ("fd91:0:0:0:0:0:1:2379", Address("", "fd91:0:0:0:0:0:1:2379", None)),
        ("::ffff:10.0.0.7", Address("", "::ffff:10.0.0.7", None)),
        ("https://etcd.example:2379", Address("https", "etcd.example", 2379)),
        ("http://[::1]:2379/", Address("http", "::1", 2379)),
    ],
)
def test_an_endpoint_is_a_host_with_an_optional_scheme_and_port(text: str, address: Address) -> None:
    assert endpoints(text) == (address,)
    assert endpoints(str(address)) == (address,)
