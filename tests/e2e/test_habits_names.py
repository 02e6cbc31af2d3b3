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

# The tests of this file do not use torch itself.
TORCH_ALONE = ("--preload", "torch")
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

    def test_standard_names_that_keep_nobody_from_forking(self, tmp_path: Path) -> None:
        # Python loads some of these at its start (os, encodings), torch loads one (profile), and none loads wave.
        names = ("os", "encodings", "profile", "wave")
        for name in names:
            script(tmp_path, "MINE = True\n", f"{name}.py")
        said = "".join(f"import {name}\nprint(getattr({name}, 'MINE', False))\n" for name in names)
        script(tmp_path, said)

        same(tmp_path, "train.py", forked=None)

    @pytest.mark.parametrize("form", [slow("app"), "app.zip"])
    def test_a_name_inside_a_folder_or_zip_that_is_run(self, tmp_path: Path, form: str) -> None:
        files = {"__main__.py": "import json\nprint(json.MINE)\n", "json.py": "MINE = True\n"}
        (tmp_path / "app").mkdir()
        with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
            for name, text in files.items():
                script(tmp_path / "app", text, name)
                archive.writestr(name, text)

        same(tmp_path, form, forked=False)

    def test_a_name_beside_a_folder_that_is_run_is_nobodys(self, tmp_path: Path) -> None:
        (tmp_path / "app").mkdir()
        script(tmp_path / "app", "import json\nprint(hasattr(json, 'MINE'))\n", "__main__.py")
        (tmp_path / "beside").mkdir()
        script(tmp_path / "beside", "MINE = True\n", "json.py")
        (tmp_path / "app").rename(tmp_path / "beside" / "app")

        same(tmp_path, "beside/app", forked=True)

    @pytest.mark.parametrize("files", [("torch.py", "numpy/__init__.py"), slow(("torch/x.py", "numpy/data.txt"))])
    def test_names_that_only_torch_brings(self, tmp_path: Path, files: tuple[str, ...]) -> None:
        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text("MINE = True\n")
        script(tmp_path, "import numpy, torch\nprint(*[getattr(m, 'MINE', False) for m in (numpy, torch)])\n")
        expected = fresh(tmp_path, "train.py")

        run = worker(tmp_path, "train.py", how=TORCH_ALONE)

        assert (run.code, run.out) == (0, expected.out), f"{run}\nfresh: {expected}"
        if b"True" in expected.out:
            assert len(run.execed) == 1, str(run)
            assert any(str(tmp_path / file.split("/")[0]) in run.execed[0] for file in files)
        else:
            # Python uses a folder without __init__.py only as a last resort, so workers may still be forked with torch.
            assert not run.execed, str(run)

    @pytest.mark.slow
    def test_a_script_called_torch_imports_itself_as_it_would_have(self, tmp_path: Path) -> None:
        script(tmp_path, "import torch\nprint(__name__, torch.__file__, hasattr(torch, 'Tensor'))\n", "torch.py")

        expected = fresh(tmp_path, "torch.py")
        run = worker(tmp_path, "torch.py", how=TORCH_ALONE)

        assert (run.code, run.out) == (0, expected.out), str(run)
        assert len(run.execed) == 1, str(run)

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
        for how in (("--preload", "wave"), NO_PRELOAD):
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

    def test_a_link_to_the_script_finds_the_modules_beside_the_real_one(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        script(tmp_path / "real", "HELP = 1\n", "helper.py")
        script(tmp_path / "real", SAY + "import helper\nprint(helper.__file__)\n")
        (tmp_path / "link.py").symlink_to("real/train.py")

        same(tmp_path, "link.py")

    def test_a_script_without_a_suffix(self, tmp_path: Path) -> None:
        """tests/e2e/fidelity/test_ends.py has all kinds of bytes at a script's start and at the ends of its lines."""
        script(tmp_path, "#!/usr/bin/env python\n" + SAY, "train")

        same(tmp_path, "train")


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

    def test_a_name_that_is_no_text(self, tmp_path: Path) -> None:
        name = b"tr\xe4in \xff.py"
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text(
            "import os, sys\nprint(ascii([sys.argv, __file__]))\n"
        )

        same(tmp_path, name, b"\xe4", no_preload=True)

    def test_the_traceback_of_such_a_script_is_shown_and_recorded(self, tmp_path: Path) -> None:
        folder = tmp_path / "mein Ordner ü"
        folder.mkdir()
        script(folder, "def f():\n    raise ValueError('schön')\nf()\n", "träin.py")

        run = same(tmp_path, "mein Ordner ü/träin.py", env={"LC_ALL": "C.UTF-8"})

        assert "träin.py".encode() in run.err


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

    def test_modules_in_an_egg_on_pythonpath_and_on_sys_path(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            with zipfile.ZipFile(tmp_path / f"{name}.egg", "w") as archive:
                archive.writestr(f"of_{name}.py", f"NAME = {name!r}\n")
        script(
            tmp_path,
            "import sys\nimport of_one\nsys.path.insert(0, 'two.egg')\nimport of_two\n"
            "print(of_one.NAME, of_one.__file__, of_two.NAME, of_two.__file__, of_two.__loader__.archive)\n",
        )

        same(tmp_path, "train.py", env={"PYTHONPATH": str(tmp_path / "one.egg")})

    def test_a_zip_without_a_main_is_refused_as_python_does(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
            archive.writestr("other.py", "")

        same(tmp_path, "empty.zip")

    def test_a_module_run_by_its_name_from_an_archive(self, tmp_path: Path) -> None:
        package = _package(tmp_path)
        zipapp.create_archive(package, tmp_path / "app.pyz")
        script(tmp_path, "", "unused.py")

        same(tmp_path, "-m", "parts.inner", env={"PYTHONPATH": str(tmp_path / "app.pyz")})
