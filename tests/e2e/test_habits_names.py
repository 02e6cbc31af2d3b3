"""Names and places: modules that shadow installed ones, paths with odd letters, archives, other folders."""

from __future__ import annotations

import os
import zipapp
import zipfile
from pathlib import Path

import pytest

from tests.e2e.fidelity.turns import taken
from tests.e2e.habits import LIGHT, NO_PRELOAD, fresh, same, same_twice, worker
from tests.harness import script, slow

SAY = "import sys\nprint([sys.argv, sys.path, __file__, __name__, __package__, __spec__ and __spec__.name])\n"


class TestShadows:
    """A module beside the script goes before an installed one of the same name, as in a fresh interpreter."""

    # Modules that every interpreter loads (types), that any preload loads (json), and that the fork server loads.
    @pytest.mark.parametrize("name", ["types", "json", slow("signal"), slow("socket")])
    def test_a_standard_name_beside_the_script(self, tmp_path: Path, name: str) -> None:
        script(tmp_path, "MINE = True\n", f"{name}.py")
        script(tmp_path, f"import {name}\nprint(getattr({name}, 'MINE', False))\n")

        # Whether it is loaded before the script depends on what the fork server itself imports.
        same(tmp_path, "train.py", forked=False if name == "json" else None, named=tmp_path / f"{name}.py")

    def test_a_users_module_on_pythonpath_shadows_a_preloaded_one(self, tmp_path: Path) -> None:
        for folder in ("first", "second", "mine"):
            (tmp_path / folder).mkdir()
        script(tmp_path / "second", "MINE = 'on PYTHONPATH'\n", "wave.py")
        script(tmp_path / "first", "HELPS = 'first'\n", "helper.py")
        script(tmp_path / "second", "HELPS = 'second'\n", "helper.py")
        script(tmp_path / "mine", "import helper, wave, sys\nprint(wave.MINE, helper.HELPS, sys.path)\n")

        # Python finds the user's module in a fresh process, and also when the fork server preloads.
        env = {"PYTHONPATH": os.pathsep.join(str(tmp_path / folder) for folder in ("first", "nowhere", "second"))}
        expected = fresh(tmp_path, "mine/train.py", env=env)
        assert b"on PYTHONPATH first" in expected.out
        for how in (("--preload-only", "wave"), NO_PRELOAD):
            run = worker(tmp_path, "mine/train.py", how=how, env=env)

            assert (run.code, run.out) == (0, expected.out), str(run)


class TestOtherFolders:
    def test_another_folder_or_none_while_it_runs(self, tmp_path: Path) -> None:
        (tmp_path / "lib").mkdir()
        script(tmp_path, "WHERE = 'beside the script'\n", "beside.py")
        script(tmp_path / "lib", "WHERE = 'below'\n", "below.py")
        programs = {
            "chdir before importing its own modules": "import os, sys\nos.chdir('/')\nimport beside\n"
            "os.chdir(os.path.dirname(os.path.abspath(__file__)))\nsys.path.insert(0, 'lib')\nimport below\n"
            "os.chdir('lib'); sys.path.insert(0, ''); sys.path_importer_cache.clear()\n"
            "print(beside.WHERE, below.WHERE, below.__file__, os.getcwd(), os.environ.get('PWD') == os.getcwd())\n",
            "a folder that is gone": "import os, shutil\n"
            "gone = f'gone {os.getpid()}'\nos.mkdir(gone); os.chdir(gone); os.rmdir(f'../{gone}')\nimport wave\n",
        }

        turns = taken(tmp_path.resolve(), LIGHT, programs)

        for name in programs:
            ours, theirs = turns.both(name)
            assert ours == theirs, name
            assert ours.code == 0
        assert "fresh interpreter" not in turns.said


LOCALES = {
    "C": {"LANG": "C"},
    "C.UTF-8": {"LANG": "C.UTF-8"},
    "POSIX": {"LC_ALL": "POSIX"},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


class TestLetters:
    @pytest.mark.parametrize("locale", [slow("C"), slow("C.UTF-8"), slow("POSIX"), "ascii"])
    def test_spaces_and_letters_of_the_world_under_every_locale(self, tmp_path: Path, locale: str) -> None:
        name = "mein Ordner ü 日本/träin 訓練 $x '\"\\.py"
        path = tmp_path / name
        path.parent.mkdir()
        # Write UTF-8, whatever the test's own locale is: the job has another one.
        path.with_name("hélper.py").write_text("HERE = __file__\n", encoding="utf-8")
        path.write_text(
            "import os, sys\n"
            "print(sys.stdout.errors, sys.stdin.errors)\n"
            "print(ascii([sys.argv, sys.path[0], __file__]))\n"
            "print(ascii(sorted(n for n in os.listdir(os.path.dirname(__file__)) if n[0] != '_')))\n"
            "print(sys.getfilesystemencoding(), sys.stdout.encoding, sys.stderr.errors)\n"
            "print(open(0, closefd=False).encoding.lower())\n"
            "print(os.environ.get('LC_CTYPE'), ascii(os.environ['WÖRD']))\n"
            "import importlib\n"
            "try: print(ascii(importlib.import_module('h\\xe9lper').HERE))\n"
            "except Exception as error: print(type(error).__name__)\n",
            encoding="utf-8",
        )
        unset = {"LC_ALL": "", "LC_CTYPE": "", "PYTHONIOENCODING": ""}

        # Python handles a locale at its start the same way in both kinds of workers. One locale is enough to show it.
        twice = locale == "ascii"
        env = {**unset, "WÖRD": "wört", **LOCALES[locale]}
        same(tmp_path, os.fsencode(name), "ärgument", env=env, no_preload=twice)


def _package(folder: Path) -> Path:
    """A program of several modules that takes arguments and reads a file of its own."""
    package = folder / "source"
    (package / "parts").mkdir(parents=True)
    (package / "parts" / "__init__.py").write_text("")
    (package / "parts" / "data.txt").write_text("data")
    script(package / "parts", "import pkgutil\ndef text(): return pkgutil.get_data('parts', 'data.txt')\n", "inner.py")
    script(
        package,
        SAY
        + "from parts import inner\nprint(inner.text(), inner.__file__, type(__loader__).__name__)\n"
        + "import os\nif os.environ.get('ELAUNCH_GENERATION') == '0': raise ValueError('from the archive')\n",
        "__main__.py",
    )
    return package


class TestArchives:
    @pytest.mark.parametrize("form", [slow("source"), "app.pyz", slow("train-1.0.egg"), slow("egg folder")])
    def test_a_program_of_many_files_with_arguments_fails_and_ends(self, tmp_path: Path, form: str) -> None:
        package = _package(tmp_path)
        match form:
            case "app.pyz":
                # With a first line for the shell, so that it does not begin as a zip file does.
                zipapp.create_archive(package, tmp_path / form, interpreter="/usr/bin/env python3")
            case "train-1.0.egg":
                with zipfile.ZipFile(tmp_path / form, "w") as archive:
                    for path in package.rglob("*"):
                        archive.write(path, path.relative_to(package))
                    archive.writestr("EGG-INFO/PKG-INFO", "Name: train\n")
            case "egg folder":
                form = "train-1.0-py3.egg"
                package.rename(tmp_path / form)
                (tmp_path / form / "EGG-INFO").mkdir()
                (tmp_path / form / "EGG-INFO" / "PKG-INFO").write_text("Name: train\n")

        run = same_twice(tmp_path, form, "--lr", "0.1", "two words")

        assert b"from the archive" in run.err

    def test_a_module_run_by_its_name_from_an_archive(self, tmp_path: Path) -> None:
        package = _package(tmp_path)
        zipapp.create_archive(package, tmp_path / "app.pyz")
        script(tmp_path, "", "unused.py")

        same(tmp_path, "-m", "parts.inner", env={"PYTHONPATH": str(tmp_path / "app.pyz")})
