"""The job file: any option, the program, and sentences with the line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.agent.config import StreamChoice, Streams
from elaunch.launcher.options.options import Options, Source, UsageError, parse, parse_job_file
from elaunch.launcher.options.table import TABLE
from elaunch.rendezvous.types import ProgramKind


def options_with(text: str, tmp_path: Path, *argv: str, **environ: str) -> Options:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return parse(["--config", str(path), *argv], environ)


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_default(tmp_path: Path) -> None:
    text = "max-restarts: 7\nrole: filed\nstop_grace: 5\nscript: t.py\n"

    options = options_with(text, tmp_path, "--max-restarts", "1", PET_MAX_RESTARTS="2", PET_ROLE="exported")

    assert (options.max_restarts, options.role, options.stop_grace) == (1, "exported", 5.0)
    assert options.failure_grace == 0.5
    assert options.given["stop_grace"] is Source.FILE
    assert options.given["role"] is Source.ENVIRONMENT


def test_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    """YAML 1.1 reads 12:1 as 721 and no as False."""
    text = "redirects: 12:1\nmaster_port: 29500:29600\nrole: no\nrun-id: 0012\nscript: t.py\nargs: [--lr, 0.10, yes]\n"

    options = options_with(text, tmp_path)

    assert options.redirects == StreamChoice(Streams.NONE, {12: Streams.OUT})
    assert options.master_port == (29500, 29600)
    assert (options.role, options.run_id) == ("no", "0012")
    assert options.args == ("--lr", "0.10", "yes")


def test_lists_and_mappings_stand_for_comma_lists(tmp_path: Path) -> None:
    text = (
        "script: t.py\nredirects: {0: 3, 12: 1}\nrdzv_conf: {timeout: 3}\nranks-filter: [0, 8]\n"
        "duplicate-stdout-filters: ['a, b', c]\npreload: [torch, numpy]\nstandalone: true\nno-preload:\n"
    )

    options = options_with(text + "role: {ps: 1, trainer: 3}\n", tmp_path)

    assert (options.role, options.nproc_per_node) == ("ps=1,trainer=3", 4)
    assert options.redirects.by_rank == {0: Streams.BOTH, 12: Streams.OUT}
    assert options.rdzv_conf == {"timeout": "3"}
    assert options.ranks_filter == frozenset({0, 8})
    assert options.duplicate_stdout_filters == ("a, b", "c")
    assert options.preload == ("torch", "numpy")
    assert options.standalone


def test_the_file_names_the_program_unless_the_command_line_does(tmp_path: Path) -> None:
    text = "module: pkg.train\nargs: [--lr, 0.1]\n"

    of_file = options_with(text, tmp_path)
    of_command_line = options_with(text, tmp_path, "other.py", "-x")

    assert (of_file.kind, of_file.target, of_file.args) == (ProgramKind.MODULE, "pkg.train", ("--lr", "0.1"))
    assert (of_command_line.kind, of_command_line.target) == (ProgramKind.SCRIPT, "other.py")
    assert of_command_line.args == ("-x",)


def test_every_option_but_the_few_that_make_no_sense_can_stand_in_a_file() -> None:
    for spec in TABLE:
        if spec.long in ("config", "help", "version", "module"):
            continue
        for name in spec.names:
            assert spec.name in parse_job_file(f"{name}: 1\n", "j").options
            assert spec.name in parse_job_file(f"{name.replace('-', '_')}: 1\n", "j").options


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nproc_per_nod: 2\n", "nproc-per-nod is not an option of elaunch; did you mean nproc-per-node?"),
        ("script: t.py\nmax_restarts: many\n", "max-restarts: many is not a whole number; give 0 or more"),
        ("script: t.py\nrole: [a, b]\n", "role: ['a', 'b'] is not a single value; give one word"),
        ("role: a\nr_ole: b\n", "r-ole is not an option of elaunch; did you mean role?"),
        ("stop-grace: 1\nshutdown_timeout: 2\n", "shutdown-timeout is given twice; keep one"),
        ("run-id: 1\nrun_id: 2\n", "run_id is given twice; keep one"),
        ("token: hush\n", "token is not an option of elaunch; did you mean token-file?"),
        ("module: true\n", "module is true; give one name"),
        ("script: a.py\nargs: --lr 1\n", "args is '--lr 1'; give a list, as in [--lr, 0.1]"),
        ("script: a.py\nargs: [[a]]\n", "args holds a list or mapping inside another; write plain text there"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        options_with(text, tmp_path)

    assert str(caught.value) == f"{tmp_path / 'job.yaml'}: {sentence}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "is not a mapping of options; write one `name: value` per line"),
        ("role: [a\nrun-id: b\n", "is not YAML: .*line 2"),
        ("script: a.py\nmodule: b\n", r"names a script \(a.py\) and a module \(b\); keep one of them"),
        ("args: [a]\n", "no program to run"),
    ],
)
def test_a_file_that_is_no_job_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        options_with(text, tmp_path)

    assert "\n" not in str(caught.value)


def test_a_switch_of_the_command_line_that_contradicts_the_files_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^-m or --no-python contradicts .*, whose program is t\.py; drop it"):
        options_with("script: t.py\n", tmp_path, "-m")

    assert options_with("script: prog\nno-python: 1\n", tmp_path).kind is ProgramKind.COMMAND
