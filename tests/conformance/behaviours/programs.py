"""13 to 20: how the program is started, and how options are typed."""

from __future__ import annotations

from tests.conformance.behaviours.behaviour import Behaviour
from tests.conformance.trial import SAY_ARGUMENTS, Expected, Trial

_OPTIONS = "tests/unit/launcher/options/test_options.py"
_ARGV = "tests/unit/launcher/options/test_argv.py"

_MODULE = """
import os, sys

print(f"rank {os.environ['RANK']}: {__name__} of {__package__}, {sys.argv[1:]}", flush=True)
"""

BEHAVIOURS = (
    Behaviour(
        number=13,
        fact="A script runs as `python -u script args…`, with `PYTHON_EXEC` or the launcher's own Python",
        trials=(
            Trial(
                args="--nproc-per-node 1 train.py a b",
                program=SAY_ARGUMENTS,
                files={"python.sh": '#!/bin/sh\necho "started with $*"\nexec python3 "$@"\n'},
                env={"PYTHON_EXEC": "{folder}/python.sh"},
                torchrun=Expected(says=("^started with -u train.py a b$", r"rank 0: \['train\.py', 'a', 'b'\]")),
            ),
        ),
    ),
    Behaviour(
        number=14,
        fact="`-m pkg.mod a b` runs as `python -u -m pkg.mod a b`",
        trials=(
            Trial(
                args="-m pkg.mod a --b",
                files={"pkg/__init__.py": "", "pkg/mod.py": _MODULE},
                torchrun=Expected(says=(r"rank 0: __main__ of pkg, \['a', '--b'\]",)),
            ),
        ),
    ),
    Behaviour(
        number=15,
        fact="`--no-python prog a b` runs a command; together with `-m` it is an error",
        differs="the error has exit code 2, torchrun's 1. A shell script or a binary without `--no-python` is"
        " refused with a hint; torchrun gives it to Python",
        trials=(
            Trial(args="--no-python echo logged a b", torchrun=Expected(says=(r"logged a b$",))),
            Trial(
                args="--no-python -m echo",
                torchrun=Expected(code=1, says=("ValueError",)),
                elaunch=Expected(code=2, says=("--module contradicts --no-python",)),
            ),
            Trial(
                args="x.sh",
                files={"x.sh": "echo hello from $0\n"},
                torchrun=Expected(code=1, says=("SyntaxError",)),
                elaunch=Expected(code=2, says=(r"start it with --no-python \./x\.sh$",)),
            ),
        ),
        proofs=(
            "tests/e2e/test_documented_commands.py::test_a_command_of_a_page_has_the_documented_effect",
            f"{_OPTIONS}::test_a_wrong_request_is_one_sentence_with_its_values_and_the_way_out",
            "tests/unit/launcher/test_preflight.py::test_a_command_that_is_given_as_a_script_gets_the_line_that_starts_it",
        ),
    ),
    Behaviour(
        number=16,
        fact="`--run-path` runs the script in a child with its own `sys.argv`",
        trials=(
            Trial(
                args="--run-path train.py a --b",
                program=SAY_ARGUMENTS,
                torchrun=Expected(says=(r"rank 0: \['train\.py', 'a', '--b'\]",)),
            ),
        ),
        proofs=(f"{_OPTIONS}::test_the_program_and_its_arguments_are_found",),
    ),
    Behaviour(
        number=17,
        fact="Everything after the script is the script's, also what looks like an option of the launcher",
        trials=(
            Trial(
                args="train.py --nproc-per-node 4 -m --standalone",
                program=SAY_ARGUMENTS,
                torchrun=Expected(
                    says=(r"rank 0: \['train\.py', '--nproc-per-node', '4', '-m', '--standalone'\]",), never=("rank 1",)
                ),
            ),
        ),
        proofs=(f"{_ARGV}::test_what_follows_the_program_is_its_own_even_if_it_resembles_ours",),
    ),
    Behaviour(
        number=18,
        fact="An option is spelled with dashes or underscores, and shortened while it is unambiguous",
        trials=(
            Trial(
                args="--nproc_per_node 2 --max-res=1 train.py WORLD_SIZE TORCHELASTIC_MAX_RESTARTS",
                torchrun=Expected(says=("rank 1: WORLD_SIZE=2 TORCHELASTIC_MAX_RESTARTS=1",)),
            ),
        ),
        proofs=(
            f"{_ARGV}::test_dashes_underscores_and_prefixes_name_the_same_option",
            f"{_ARGV}::test_a_prefix_that_torchrun_understands_means_the_same_here",
        ),
    ),
    Behaviour(
        number=19,
        fact="`PET_<OPTION>` is an option's default, and the command line wins; a switch is `PET_X=1` or `0`",
        differs="`true` and `false` are read too, and every option has a variable. A misspelt variable is reported;"
        " torchrun ignores it silently",
        trials=(
            Trial(
                args="--max-restarts 1 train.py WORLD_SIZE TORCHELASTIC_MAX_RESTARTS",
                env={"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "2", "PET_STANDALONE": "1", "PET_MODULE": "0"},
                torchrun=Expected(says=("rank 1: WORLD_SIZE=2 TORCHELASTIC_MAX_RESTARTS=1",)),
            ),
            Trial(
                args="train.py",
                env={"PET_STANDALONE": "true"},
                torchrun=Expected(code=1, says=("ValueError",)),
                elaunch=Expected(),
            ),
            Trial(
                args="train.py WORLD_SIZE",
                env={"PET_NPROC_PRE_NODE": "2"},
                torchrun=Expected(says=("WORLD_SIZE=1",), never=("PET_",)),
                elaunch=Expected(says=("WORLD_SIZE=1", r"PET_NPROC_PRE_NODE is set.* did you mean PET_NPROC_PER_NODE")),
            ),
        ),
        proofs=(
            f"{_OPTIONS}::test_every_option_is_read_from_its_variable_and_the_command_line_wins",
            f"{_OPTIONS}::test_a_switch_is_read_from_its_variable",
            f"{_OPTIONS}::test_a_misspelt_variable_is_named_with_the_one_that_is_meant",
        ),
    ),
    Behaviour(
        number=20,
        fact="`${local_rank}` in the script's arguments is each worker's own, and `$$` becomes `$`",
        trials=(
            Trial(
                args="--nproc-per-node 2 train.py '--gpu=${local_rank}' '$HOME' '${other}' '5$$'",
                program=SAY_ARGUMENTS,
                torchrun=Expected(says=(r"rank 1: \['train\.py', '--gpu=1', '\$HOME', '\$\{other\}', '5\$'\]",)),
            ),
        ),
    ),
)
