"""39 to 46 and 51: records of failures, the report, and the workers' output."""

from __future__ import annotations

from tests.conformance.behaviours.behaviour import Behaviour
from tests.conformance.trial import Expected, Trial

_OUTPUT = "tests/e2e/test_output.py"
_REPORT = "tests/unit/launcher/test_report.py"
_OPTIONS = "tests/unit/launcher/options/test_options.py"

# torch's @record writes this. The program needs no torch for it.
_RECORD = """
import json, os, sys

message = {"message": "ValueError: too large", "extraInfo": {"py_callstack": "stack", "timestamp": "1700000000"}}
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": message}, file)
sys.exit(1)
"""
_LINES = """
import os, sys

os.write(1, f"out of {os.environ['RANK']}\\nloss 1 of {os.environ['RANK']}\\n".encode())
os.write(2, f"err of {os.environ['RANK']}\\nwarn of {os.environ['RANK']}\\n".encode())
"""
_READS = """
import os, sys

print("read", sys.stdin.readline().strip(), flush=True)
"""
_TREE = "logs/*/attempt_0"


def _two(options: str, torchrun: Expected, elaunch: Expected | None = None) -> Trial:
    return Trial(program=_LINES, args=f"--nproc-per-node 2 {options} train.py", torchrun=torchrun, elaunch=elaunch)


BEHAVIOURS = (
    Behaviour(
        number=39,
        fact="`TORCHELASTIC_ERROR_FILE` is each worker's own; the first failure's record goes to the launcher's own"
        " error file, with `errorCode`",
        differs="a half-written record costs nothing, where torchrun's agent raises; a script without `@record` has a"
        " record too",
        trials=(
            Trial(
                program=_RECORD,
                args="--max-restarts 0 train.py",
                env={"TORCHELASTIC_ERROR_FILE": "{folder}/reply.json"},
                torchrun=Expected(
                    code=1,
                    says=(r"exitcode +: 1 \(pid",),
                    leaves={"reply.json": r'ValueError: too large.*"errorCode": 1'},
                ),
            ),
        ),
        proofs=(
            "tests/e2e/test_failures.py::test_it_is_the_first_failures_record_with_the_exit_code",
            f"{_REPORT}::test_where_there_is_no_whole_record_ours_is_handed_on",
        ),
    ),
    Behaviour(
        number=40,
        fact="The report has the lines `Root Cause (first observed failure):` and `exitcode  : N (pid: …)`",
        differs="it has the traceback or the last lines of stderr, also without `@record`, and names no worker that the"
        " agent itself stopped",
        trials=(
            Trial(
                program="raise SystemExit(3)\n",
                args="--max-restarts 0 train.py",
                torchrun=Expected(
                    code=1, says=(r"Root Cause \(first observed failure\):", r"^  exitcode  : 3 \(pid: \d+\)")
                ),
            ),
        ),
        proofs=(f"{_REPORT}::test_the_text_that_scripts_search_for_in_torchruns_box_is_there",),
    ),
    Behaviour(
        number=41,
        fact="The title of the report is the script's name and `FAILED`",
        trials=(
            Trial(
                program="raise SystemExit(3)\n",
                args="--max-restarts 0 train.py",
                torchrun=Expected(code=1, says=("^train.py FAILED$",)),
            ),
        ),
    ),
    Behaviour(
        number=42,
        fact="`-r` and `-t` take 0, 1, 2, 3, or a map of local ranks",
        differs="ranks from 10 on may be in the map; a wrong value has exit code 2, torchrun's 1",
        trials=(
            _two(
                "-r 1:1,0:0 --log-dir logs",
                Expected(
                    never=("out of 1",), says=("out of 0", "err of 1"), leaves={f"{_TREE}/1/stdout.log": "out of 1"}
                ),
            ),
            _two("-r 4", Expected(code=1, says=("ValueError",)), Expected(code=2, says=("--redirects 4 does not",))),
            _two(
                "-t 0:3,12:1 --log-dir logs",
                Expected(code=1, says=("ValueError",)),
                Expected(says=("out of 0",), leaves={f"{_TREE}/0/stdout.log": "out of 0"}),
            ),
        ),
    ),
    Behaviour(
        number=43,
        fact="Output is kept in `LOG_DIR/<run>/attempt_<n>/<local rank>/stdout.log` and `stderr.log`; `/dev/null` keeps"
        " none",
        differs="`--log-dir` alone keeps files and shows the output too. Without it only `-r` and `-t` leave a"
        " folder in /tmp; torchrun always does. `attempt_<n>` is the generation, its folders have global ranks, and no"
        " restart removes an older one. A file in the folder's place is a usage error",
        trials=(
            _two(
                "-r 3 --log-dir logs/new",
                Expected(
                    never=("out of",),
                    leaves={
                        "logs/new/*/attempt_0/0/stdout.log": "out of 0",
                        "logs/new/*/attempt_0/1/stderr.log": "err",
                    },
                ),
            ),
            _two(
                "-r 3 --log-dir train.py",
                Expected(code=1, says=("NotADirectoryError",)),
                Expected(code=2, says=("--log-dir train.py is a file",)),
            ),
            Trial(args="--log-dir /dev/null train.py", torchrun=Expected(says=("rank 0:",))),
        ),
        proofs=(
            f"{_OUTPUT}::test_each_generation_and_rank_keeps_its_files_through_restarts",
            f"{_OUTPUT}::test_output_that_is_to_go_to_files_goes_to_a_private_folder_if_none_is_named",
            "tests/unit/launcher/test_preflight.py::test_a_file_is_no_log_directory",
            f"{_OPTIONS}::test_a_log_directory_alone_tees_everything",
        ),
    ),
    Behaviour(
        number=44,
        fact="With `-t` a line begins with `[default0]:`, or with `TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`",
        trials=(
            _two("-t 3 --log-dir logs", Expected(says=(r"^\[default0\]:out of 0$", r"^\[default1\]:err of 1$"))),
            Trial(
                program=_LINES,
                args="--nproc-per-node 2 -t 3 --log-dir logs --role actor train.py",
                env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank} ${local_rank}> "},
                torchrun=Expected(says=("^<actor 1 1> out of 1$",)),
            ),
        ),
    ),
    Behaviour(
        number=45,
        fact="`--local-ranks-filter` is about the console, and files are still written",
        trials=(
            _two(
                "-t 3 --log-dir logs --local-ranks-filter 1",
                Expected(says=("out of 1",), never=("out of 0",), leaves={f"{_TREE}/0/stdout.log": "out of 0"}),
            ),
        ),
    ),
    Behaviour(
        number=46,
        fact="`--duplicate-stdout-filters` and `--duplicate-stderr-filters` copy lines to"
        " `attempt_<n>/filtered_stdout.log` and `filtered_stderr.log`",
        trials=(
            _two(
                "-t 3 --log-dir logs --duplicate-stdout-filters step,loss --duplicate-stderr-filters warn",
                Expected(
                    leaves={
                        f"{_TREE}/filtered_stdout.log": r"(?s)\A(?!.*out of).*loss 1 of 1",
                        f"{_TREE}/filtered_stderr.log": r"(?s)\A(?!.*err of).*warn of 0",
                    }
                ),
            ),
        ),
    ),
    Behaviour(
        number=51,
        fact="Without `-r` and `-t` the workers' output has no prefix, and stdin is theirs",
        differs="lines of several workers have `[rank]` in front, and stay whole. If stdin is not a terminal, only the"
        " first worker reads it",
        trials=(
            _two(
                "",
                Expected(says=("^out of 0$", "^err of 1$")),
                Expected(says=(r"^\[0\] out of 0$", r"^\[1\] err of 1$")),
            ),
            Trial(args="train.py", torchrun=Expected(says=("^rank 0: $",))),
            Trial(program=_READS, args="train.py", stdin="hello\n", torchrun=Expected(says=("^read hello$",))),
        ),
    ),
)
