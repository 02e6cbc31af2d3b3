"""Which modules of a program's imports suit a fork server, as a process finds that imports them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from elaunch.agent.forkserver.selection import ProbeAnswer, Wanted
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.job_spec import Program, ProgramKind
from tests.harness import RUN_LIMIT_S

# As six makes `six.moves`: its importer makes a module that has no file.
MAKER = """
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
class Importer:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name == f"{__name__}.moves" else None
    def create_module(self, spec):
        return ModuleType(spec.name)
    def exec_module(self, module):
        module.__path__ = []
__path__ = []
sys.meta_path.append(Importer())
"""
# The probe replaces functions of Python's import system, so it has a process of its own. It looks for the program with
# zipfile, which a fork server has.
PROBE = """
import sys, zipfile
from elaunch.agent.forkserver.probe import probe_for_agent
from elaunch.rendezvous.codec import decode
from elaunch.rendezvous.job_spec import Program
probe_for_agent(int(sys.argv[1]), int(sys.argv[2]), decode(Program, sys.argv[3]), [*sys.modules])
"""


def probed(folder: Path, wanted: Wanted, **variables: str) -> ProbeAnswer:
    """The answer of a process that finds packages in `lib/site-packages` of `folder`, and others in `own`."""
    (folder / "wanted").write_text(encode(wanted))
    program = Program(ProgramKind.SCRIPT, os.fspath(folder / "own" / "train.py"), (), sys.executable)
    path = os.pathsep.join(os.fspath(each) for each in (folder / "lib/site-packages", folder / "own"))
    env = {**os.environ, **variables, "PYTHONPATH": path}
    with (folder / "wanted").open() as question, (folder / "answer").open("w") as answer:
        fds = (question.fileno(), answer.fileno())
        words = [sys.executable, "-c", PROBE, *map(str, fds), encode(program)]
        # It ends its process group at its end.
        subprocess.run(words, env=env, pass_fds=fds, start_new_session=True, check=False, timeout=RUN_LIMIT_S)
    return decode(ProbeAnswer, (folder / "answer").read_text())


def modules(folder: Path, place: str, **texts: str) -> None:
    (folder / place).mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / place / f"{name}.py").write_text(text)


def test_what_asks_for_a_module_without_a_file_goes_with_the_package_that_made_it(tmp_path: Path) -> None:
    modules(tmp_path, "lib/site-packages", maker=MAKER, uses="import maker.moves", asks="import own_maker.moves")
    modules(tmp_path, "own", own_maker=MAKER)

    selection = probed(tmp_path, Wanted(("uses", "asks"))).selection

    assert selection.entries == ("uses",)
    assert selection.left_out == ("asks", "own_maker", "own_maker.moves")
    assert selection.reasons == tuple(f"{name} is not of an installed package" for name in selection.left_out[1:])


def test_what_copies_all_variables_keeps_none_that_the_program_sets(tmp_path: Path) -> None:
    copies = "import os\nKNOWN = [name for name in dict(os.environ) if name.startswith('X_')]"
    modules(tmp_path, "lib/site-packages", copies=copies, keeps="import os\nMODE = os.environ.get('MODE')")

    selection = probed(tmp_path, Wanted(("copies", "keeps"), variables=("MODE",)), MODE="fast").selection

    assert selection.entries == ("copies",)
    assert selection.reasons == ("keeps looks up MODE, which the program sets",)
