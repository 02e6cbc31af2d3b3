"""The command line of a job: torchrun's argparse spellings."""

from __future__ import annotations

import click
import pytest
from click.core import ParameterSource

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.command_line import ELAUNCH, ParseState
from elaunch.launcher.options.options import RUN, parse
from elaunch.launcher.options.table import TABLE


def options_of(*argv: str) -> list[tuple[str, object]]:
    given = RUN.make_context("elaunch run", list(argv), obj=ParseState()).obj.given
    return [(name.replace("_", "-"), each.raw) for name, each in given.items()]


@pytest.mark.parametrize("word", ["--nproc-per-node", "--nproc_per_node", "--nproc-per_node", "--nproc", "--np"])
def test_dashes_underscores_and_prefixes_name_the_same_option(word: str) -> None:
    assert options_of(word, "2", "t.py") == options_of(f"{word}=2", "t.py") == [("nproc-per-node", "2")]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["-r", "3"], [("redirects", "3")]),
        (["-r=3"], [("redirects", "3")]),
        (["-mr3"], [("module", "on"), ("redirects", "3")]),
        (["--hang", "9"], [("hang-timeout", "9")]),
        (["--rdzv-id", "a", "--run_id=b"], [("run-id", "b")]),
        (["--role=-x"], [("role", "-x")]),
        (["--rdzv_conf", "a_b=b=c"], [("rdzv-conf", "a_b=b=c")]),
    ],
)
def test_short_and_joined_forms_are_read_as_argparse_reads_them(
    argv: list[str], expected: list[tuple[str, object]]
) -> None:
    assert options_of(*argv, "t.py") == expected


def test_what_follows_the_program_is_its_own_even_if_it_resembles_ours() -> None:
    options = parse(["-m", "pkg.mod", "--nproc-per-node", "4", "--", "-r3", "--help", "--no_such"], {})

    assert [*options.given] == ["module"]
    assert options.program == ("pkg.mod", "--nproc-per-node", "4", "--", "-r3", "--help", "--no_such")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nproc-pre-node", "2"], "No such option.*--nproc-pre-node.*--nproc-per-node"),
        (["--master", "x"], "No such option.*--master.*--master-addr.*--master-port"),
        (["--token", "hush"], "^--token would show the job's token to everybody; set ELAUNCH_TOKEN, or give"),
        (["--nprocs", "2"], "^--nprocs is not an option of elaunch; did you mean --nproc-per-node"),
        (["--num_machines=2"], "did you mean --nnodes"),
        (["--use_env"], "^--use-env is not an option of elaunch, which always does that: .*LOCAL_RANK"),
        (["--print-completion", "zsh"], "_ELAUNCH_COMPLETE=bash_source elaunch"),
        (["--standalone=1"], "--standalone.* does not take a value"),
        (["--log-dir"], "--log-dir.* requires an argument"),
        (["-mmod"], "No such option.*-o"),
    ],
)
def test_a_word_that_cannot_be_read_is_one_sentence(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse([*argv, "t.py"] if argv[-1] != "--log-dir" else argv, {})


def typed_in(*argv: str) -> tuple[set[str | None], tuple[str, ...]]:
    """The options that are read from `argv`, whatever their values are, and the program."""
    ctx = RUN.make_context("elaunch", [*argv], obj=ParseState(), resilient_parsing=True)
    found = {each.name for each in TABLE if ctx.get_parameter_source(each.name) is ParameterSource.COMMANDLINE}
    return found, ctx.params["program"]


def test_a_prefix_that_torchrun_understands_means_the_same_here() -> None:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    known = [
        action for action in parser._actions if action.dest not in ("log_line_prefix_template", "print_completion")
    ]
    actions = {word: action for action in known for word in action.option_strings if word.startswith("--")}
    peers = {option.peer: option.name for option in TABLE if option.peer}
    checked = 0
    for full in actions:
        for end in range(3, len(full) + 1):
            prefix = full[:end]
            fitting = {action.dest for word, action in actions.items() if word.startswith(prefix)}
            theirs = actions[prefix].dest if prefix in actions else fitting.pop() if len(fitting) == 1 else None
            if theirs is None:
                with pytest.raises(UsageError, match="No such option"):
                    parse([prefix, "t.py"], {})
            else:
                assert typed_in(prefix, "1", "t.py")[0] == {peers[theirs.replace("_", "-")]}, prefix
                checked += 1

    assert checked > 200


def test_every_option_of_torchrun_is_known_by_its_letter_and_arity() -> None:
    from torch.distributed.run import get_args_parser

    for action in [each for each in get_args_parser()._actions if each.dest != "print_completion"]:
        for word in action.option_strings:
            found, program = typed_in(*([word] if action.nargs == 0 else [word, "1"]), "t.py")
            assert (len(found), program) == (1, ("t.py",)), word


def refusal_of(*argv: str) -> str:
    """The sentence by which a command line is refused."""
    with (
        pytest.raises((UsageError, click.UsageError)) as refused,
        ELAUNCH.make_context("elaunch", [*argv], obj=ParseState()) as ctx,
    ):
        ELAUNCH.invoke(ctx)
    return str(refused.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "no program to run; "),
        ("run", "no program to run; "),
        ("rehearse", "no program to run; "),
        ("submit", "Missing command"),
        ("submit pbs", "No such command"),
        ("submit slurm", "no program to run; "),
        ("submit k8s", "--image is missing: "),
        ("submit k8s --image i", "no program to run; "),
        ("report", "report: no folder is given; "),
        ("stop", "stop needs the job's name or the pid of its elaunch"),
        ("restart", "restart needs the job's name or the pid of its elaunch"),
        ("status a b", "status takes one job, and a b are 2; start a script called status with elaunch ./status"),
        ("stacks x --run-id y", "stacks x contradicts --run-id y; "),
        ("status --nproc-per-node 2", "No such option"),
        ("submit slurm --nods 2", "No such option"),
        ("store train.py", "Got unexpected extra argument (train.py)"),
        (
            "store --token x",
            "--token would show the job's token to everybody; set ELAUNCH_TOKEN, or give --token-file",
        ),
        ("store --listen a:b", "--listen a:b is not a whole number; give a number from 0 to 65535"),
    ],
)
def test_a_command_without_its_arguments_or_with_wrong_ones_is_a_usage_error(line: str, sentence: str) -> None:
    assert refusal_of(*line.split()).startswith(sentence)
