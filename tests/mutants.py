"""Seeded mutants of the pure rules: which wrong lines do the unit tests and the simulator notice?

    make mutants ARGS="--seed 1 --number 240"
    make mutants ARGS="--again runs/mutants.json"    # the survivors of the last run

A mutant is one small change of one module, compiled in a forked process: no file of the checkout is written. A first
run records which functions each test calls. A mutant then gets the tests that call its function: those of the file that
is named after the module, the other unit tests, a part of the simulator, until one fails. The sample is ranked by a
hash of the seed, the function and the change: what was not edited gives the same mutants before and after. mutmut 3 has
no such sample, no mutants outside of functions or in most decorated ones, and writes a tree that has not src's links.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import hashlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.forked import Child

ROOT = Path(__file__).parents[1]
# Folders, and the beginnings of files' names.
PURE = ("causes/", "collectives", "exit_status", "hang", "stack_groups", "waits")
SOURCES = ("agent/core/", *(f"agent/diagnosis/{name}" for name in PURE), "rendezvous/rules/")
# What nodes report is tested beside what shows it.
UNITS = [
    "tests/unit/agent/core",
    "tests/unit/agent/diagnosis",
    "tests/unit/rendezvous/rules",
    "tests/unit/launcher/inspect/test_reports.py",
]
TESTS = (UNITS, ["tests/sim"])
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not servers and not thorough")
# Of each of the simulator's tests that have one. A mutant that waits for nothing is stopped after WALL_S.
SEED_MAX, WALL_S = 12, 900.0
# The other node of each kind that may take its place.
OTHERS: dict[type, tuple[Any, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,), ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,), ast.And: (ast.Or,), ast.Or: (ast.And,),
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
Mutant = dict[str, Any]


def changes(node: ast.AST, field: str, returns: list[ast.expr]) -> Iterator[tuple[str, Any]]:
    """What may take the place of `node`: the kind of change, and the new node (None: a case that is removed)."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHERS:
            for other in OTHERS[type(op)]:
                yield "comparison", ast.Compare(node.left, [other()], node.comparators)
        case ast.BinOp(op=op) if type(op) in OTHERS:
            yield "operator", ast.BinOp(node.left, OTHERS[type(op)][0](), node.right)
        case ast.BoolOp():
            yield "and/or", ast.BoolOp(OTHERS[type(node.op)][0](), node.values)
            for out in range(len(node.values)):
                rest = node.values[:out] + node.values[out + 1 :]
                yield "operand removed", ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(op=ast.Not()):
            yield "not removed", node.operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (("constant", ast.Constant(value + by)) for by in (1, -1))
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield "call", ast.Call(ast.Name(CALLS[name], ast.Load()), node.args, node.keywords)
        case ast.Return(value=ast.expr() as value):
            others = [other for other in returns if ast.dump(other) != ast.dump(value)]
            yield "return", ast.Return(others[0] if others else ast.Constant(None))
            if isinstance(value, ast.Tuple) and len(value.elts) > 1:
                yield "return", ast.Return(ast.Tuple([*value.elts[1::-1], *value.elts[2:]], ast.Load()))
        case (
            ast.Expr(value=ast.Call())
            | ast.AugAssign()
            | ast.Raise()
            | ast.Continue()
            | ast.Break()
            | ast.If(orelse=[])
        ):
            yield "statement removed", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement removed", ast.Pass()
        case ast.match_case() if "assert_never" not in ast.unparse(node.body[0]):
            yield "case removed", None
    # The negations of a comparison, and of `not`, are above.
    if field in ("test", "ifs", "guard") and not isinstance(node, ast.Compare | ast.UnaryOp):
        yield "condition negated", ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def sites(parent: ast.AST, first: int = 0, returns: list[ast.expr] | None = None) -> Iterator[tuple[Any, ...]]:
    """Each change below `parent`: kind, the first line of its function (0: module level), old and new node, place."""
    for field, value in ast.iter_fields(parent):
        for at, node in enumerate(value if isinstance(value, list) else [value]):
            is_type = field in ("annotation", "returns", "decorator_list", "bases")
            if not isinstance(node, ast.AST) or is_type or _is_for_types(node):
                continue
            yield from (
                (kind, first, node, new, (parent, field, at)) for kind, new in changes(node, field, returns or [])
            )
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                begins = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
                found = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
                yield from sites(node, begins, found)
            else:
                yield from sites(node, first, returns)


def mutants(file: str, seed: int) -> Iterator[Mutant]:
    tree = ast.parse((ROOT / file).read_text())
    names = {node.lineno: node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    seen: Counter[str] = Counter()
    for index, (kind, first, old, new, _) in enumerate(sites(tree)):
        line = old.body[0].lineno if isinstance(old, ast.match_case) else old.lineno
        words = [re.sub(r"\s+", " ", ast.unparse(node))[:90] if node else "nothing" for node in (old, new)]
        key = f"{names.get(max((at for at in names if at <= line), default=0), file)}: {kind}: {' -> '.join(words)}"
        seen[key] += 1
        key += f" #{seen[key]}"
        rank = hashlib.sha256(f"{seed} {key}".encode()).hexdigest()
        yield {"key": key, "file": file, "line": line, "index": index, "function": first, "rank": rank}


def mutated(mutant: Mutant) -> tuple[ast.Module, str]:
    """The module with the change, and the lines that it changes."""
    tree = ast.parse((ROOT / mutant["file"]).read_text())
    before = ast.unparse(tree).splitlines()
    *_, new, (parent, field, at) = list(sites(tree))[mutant["index"]]
    if isinstance(getattr(parent, field), list):
        getattr(parent, field)[at : at + 1] = [new] if new else []
    else:
        setattr(parent, field, new)
    diff = list(difflib.unified_diff(before, ast.unparse(tree).splitlines(), lineterm="", n=1))[2:]
    return ast.fix_missing_locations(tree), "\n".join(line for line in diff if not line.startswith("@@"))


class Watch:
    """pytest's plug-in: runs the tests of `wanted`, each with a limit of CPU time; without, records what each calls."""

    def __init__(self, wanted: dict[str, float] | None) -> None:
        self.wanted, self.failed = wanted, ""
        self.tests: dict[str, tuple[float, list[tuple[str, int]]]] = {}
        self.codes: set[Any] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seeds = {item: int(found[1]) for item in items if (found := re.search(r"sim/.*\[(\d+)\b", item.nodeid))}
        items[:] = [
            item for item in items
            if seeds.get(item, 0) <= SEED_MAX and (self.wanted is None or item.nodeid in self.wanted)
        ]  # fmt: skip

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        began_s = time.process_time()
        self.codes.clear()
        if self.wanted is None:
            sys.settrace(self.called)
        else:
            signal.setitimer(signal.ITIMER_PROF, 5 + 10 * self.wanted[item.nodeid])
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.settrace(None)
        places = {
            (os.path.relpath(os.path.realpath(code.co_filename), ROOT), code.co_firstlineno) for code in self.codes
        }
        calls = sorted(place for place in places if place[0].startswith(SOURCES))
        if self.failed != item.nodeid:
            self.tests[item.nodeid] = time.process_time() - began_s, calls
        return result

    def called(self, frame: FrameType, event: str, arg: Any) -> None:
        self.codes.add(frame.f_code)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = report.nodeid if report.failed else self.failed


def forked(work: Callable[[], Any], folder: Path, wall_s: float) -> Any:
    """What `work` returns in a forked process; None if that was stopped for its time: by SIGPROF, or here."""

    def act() -> None:
        # A session has a share of the CPU of its own.
        os.setsid()
        log = os.open(folder / f"{os.getpid()}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        (folder / f"{os.getpid()}.json").write_text(json.dumps(work()))

    with Child(act) as child:
        end_s = time.monotonic() + wall_s
        while child.code is None and time.monotonic() < end_s:
            time.sleep(0.02)
    found = folder / f"{child.pid}.json"
    return json.loads(found.read_text()) if found.exists() else None


def record(paths: list[str], folder: Path) -> dict[str, Any]:
    """What each test calls, with its seconds of CPU time, and the modules of others that the tests import."""
    watch = Watch(None)
    pytest.main([*OPTIONS, f"--basetemp={folder}/{os.getpid()}", *paths], plugins=[watch])
    return {"tests": watch.tests, "modules": [name for name in sys.modules if name.split(".")[0] not in OWN]}


OWN = ("elaunch", "tests", "__main__")


def importers(stem: str) -> list[Path]:
    asks = re.compile(rf"^ *from \S+\.{stem} import |^ *from \S+ import .*\b{stem}\b", re.MULTILINE)
    return [path for path in sources() if asks.search(path.read_text())]


def sources() -> list[Path]:
    return sorted(path for source in SOURCES for path in ROOT.glob(f"{source}{'*' if source[-1] == '/' else ''}.py"))


def tried(mutant: Mutant, tests: dict[str, Any], folder: Path) -> Mutant:
    """Import the changed module, and run the tests that call the function, the nearest first."""
    tree, diff = mutated(mutant)
    # The tests' own helpers have imported some modules before the fork.
    for name in [name for name in sys.modules if name.partition(".")[0] == "elaunch"]:
        del sys.modules[name]
    path, get_code = ROOT / mutant["file"], SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: (  # type: ignore[assignment,method-assign,misc]
        compile(tree, self.path, "exec") if Path(self.path).resolve() == path else get_code(self, name)
    )
    if mutant["function"]:
        wanted = {test: cost for test, (cost, calls) in tests.items() if [mutant["file"], mutant["function"]] in calls}
    else:
        # What a module says at its top is noticed by its own functions, and by those of modules that import it.
        users = {mutant["file"], *(str(each.relative_to(ROOT)) for each in importers(path.stem))}
        wanted = {test: cost for test, (cost, calls) in tests.items() if any(file in users for file, _ in calls)}
    # Called at the import alone: any test may notice it.
    wanted = wanted or {test: cost for test, (cost, _) in tests.items()}
    cost_s: dict[str, float] = defaultdict(float)
    for test, seconds in wanted.items():
        cost_s[test.partition("::")[0]] += seconds
    stages: dict[int, list[str]] = defaultdict(list)
    for file in sorted(cost_s, key=lambda file: cost_s[file]):
        is_near = Path(file).name.startswith(f"test_{path.stem}")
        stages[2 if file.startswith("tests/sim") else 0 if is_near else 1].append(file)
    watch = Watch(wanted)
    for number in sorted(stages):
        if pytest.main([*OPTIONS, "-x", f"--basetemp={folder}/{os.getpid()}", *stages[number]], plugins=[watch]):
            return {"result": "killed", "by": watch.failed or "import", "diff": diff}
    return {"result": "survived", "by": "", "diff": diff}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    for name, kind, default in (("seed", int, 1), ("number", int, 240), ("jobs", int, 2), ("only", str, "")):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--again", type=Path, help="run the survivors of this result again")
    parser.add_argument("--calls", type=Path, help="keep there what each test calls, or read it")
    parser.add_argument("--out", type=Path, default=Path("runs/mutants.json"))
    asked = parser.parse_args()
    files = [str(path.relative_to(ROOT)) for path in sources()]
    ranked = sorted((each for file in files for each in mutants(file, asked.seed)), key=lambda each: each["rank"])
    chosen = [mutant for mutant in ranked if asked.only in mutant["file"]][: asked.number]
    if asked.again:
        survived = {
            each["key"] for each in json.loads(asked.again.read_text())["mutants"] if each["result"] == "survived"
        }
        chosen = [mutant for mutant in ranked if mutant["key"] in survived]
    with tempfile.TemporaryDirectory(prefix="m.", dir="/tmp") as name, ThreadPoolExecutor(asked.jobs) as pool:
        folder = Path(name)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"], sys.pycache_prefix = f"{name}/hypothesis", f"{name}/cache"
        if asked.calls and asked.calls.exists():
            known = json.loads(asked.calls.read_text())
        else:
            units, lives = pool.map(lambda paths: forked(lambda: record(paths, folder), folder, 3600), TESTS)
            known = {"tests": {**units["tests"], **lives["tests"]}, "modules": units["modules"] + lives["modules"]}
        if asked.calls:
            asked.calls.write_text(json.dumps(known))
        # Once, for all forked processes.
        for module in known["modules"]:
            with contextlib.suppress(Exception):
                importlib.import_module(module)

        def work(mutant: Mutant) -> None:
            began_s = time.monotonic()
            found = forked(lambda: tried(mutant, known["tests"], folder), folder, WALL_S)
            mutant.update(found or {"result": "killed", "by": "time", "diff": mutated(mutant)[1]})
            mutant["seconds"] = round(time.monotonic() - began_s, 2)
            print(mutant["result"], mutant["seconds"], mutant["file"], mutant["key"], file=sys.stderr, flush=True)

        list(pool.map(work, chosen))
    print(report(chosen), f"\n{len(ranked)} mutants are possible")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({"seed": asked.seed, "mutants": chosen}, indent=1))


def report(done: list[Mutant]) -> str:
    """The survivors, and a table of the files."""
    lines = [f"{m['file']}:{m['line']} {m['key']}\n{m['diff']}\n" for m in done if m["result"] == "survived"]
    count = Counter((place, mutant["result"]) for mutant in done for place in (mutant["file"], "all"))
    lines += ["| file | killed | survived |", "|---|---:|---:|"]
    table = [f"| {at} | {count[at, 'killed']} | {count[at, 'survived']} |" for at in sorted({at for at, _ in count})]
    return "\n".join([*lines, *table])


if __name__ == "__main__":
    main()
