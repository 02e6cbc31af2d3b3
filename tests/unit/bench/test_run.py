"""bench.__main__ and what a turn makes of trouble: what is logged, printed, stored and returned. No job is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bench.__main__ as command
from bench.plan import Settings, Task
from bench.samples import Sample, decode


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "page.md"


@pytest.fixture
def measure(tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`python -m bench` where one turn yields a sample and then raises what is given."""

    def run(*argv: str, then: BaseException | None = None) -> int:
        def turn() -> Iterator[Sample]:
            yield Sample("first line", "elaunch", 1, {"first line": 0.125})
            if then:
                raise then

        def plan(_: Settings) -> list[Task]:
            return [Task("first line", "first line, elaunch", turn)]

        monkeypatch.setattr(command, "plan", plan)
        return command.main([*argv, "--out", str(tmp_path / "out.json"), "--page", str(page)])

    # No node is started: what nodes need (`make tools`) may be missing.
    monkeypatch.setattr(command, "missing", lambda: "")
    monkeypatch.setattr(command, "first_line", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return run


def test_a_run_prints_its_tables_and_render_makes_the_page_of_its_samples(
    measure: Callable[..., int], tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure("--only", "first-line") == 0

    out, err = capsys.readouterr()
    assert "| first line |       1 | elaunch |   1 |  0.125 | 0.125 | 0.125 |      1.00 |" in out
    assert f"--render {tmp_path / 'out.json'} --page {page}" in err
    assert not page.exists()
    assert command.main(["--render", str(tmp_path / "out.json"), "--page", str(page)]) == 0
    assert out in page.read_text()


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_a_run_that_is_stopped_prints_what_it_has(
    stop: BaseException,
    code: int,
    measure: Callable[..., int],
    tmp_path: Path,
    page: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert measure(then=stop) == code

    out, err = capsys.readouterr()
    assert "### First line" in out
    assert "stopped after 1 samples" in err
    assert len(decode((tmp_path / "out.json").read_text()).samples) == 1
    assert not page.exists()
