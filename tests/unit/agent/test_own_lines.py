"""agent.own_lines: the form of elaunch's lines, and of workers' lines in JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from elaunch.agent.config import LogFormat
from elaunch.agent.own_lines import OwnLines

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def objects(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.decode().splitlines()]


@pytest.mark.parametrize(
    ("form", "has_terminal", "has_time"),
    [(LogFormat.TEXT, False, True), (LogFormat.TEXT, True, False), (LogFormat.PLAIN, False, False)],
)
def test_only_a_text_without_a_terminal_has_times(form: LogFormat, has_terminal: bool, has_time: bool) -> None:
    line = OwnLines(form, has_terminal=has_terminal).line("the job starts").decode()

    assert re.fullmatch(f"{TIME if has_time else ''}elaunch: the job starts\n", line)


def test_no_control_character_of_a_text_reaches_the_terminal() -> None:
    lines, text = OwnLines(LogFormat.PLAIN, has_terminal=True), "a\x1b]0;x\x07b\x9b2J\r\u202e\x7f\tc"

    (shown, reported) = lines.line(text).decode(), lines.report(f"=\n{text}\n", {}).decode()

    cleaned = "a\\x1b]0;x\\x07b\\x9b2J\\x0d\\u202e\\x7f\tc"
    assert (shown, reported) == (f"elaunch: {cleaned}\n", f"=\n{cleaned}\n")


def test_in_a_report_elaunchs_own_lines_alone_get_the_time() -> None:
    text = "=====\n    elaunch: a worker's line\nelaunch: the workers' output is in logs\n"

    shown = OwnLines(LogFormat.TEXT, has_terminal=False).report(text, {}).decode()

    assert re.fullmatch(f"=====\n    elaunch: a worker's line\n{TIME}elaunch: the workers' output is in logs\n", shown)


@pytest.mark.parametrize(("exit_code", "level"), [(0, "info"), (1, "error")])
def test_a_report_is_one_object_with_the_text_and_the_record(exit_code: int, level: str) -> None:
    (line,) = objects(OwnLines(LogFormat.JSON, has_terminal=False).report("=\ntext\n", {"exit_code": exit_code}))

    assert (line["text"], line["report"], line["level"]) == ("=\ntext\n", {"exit_code": exit_code}, level)


def test_a_workers_lines_become_objects_one_each_and_any_byte_has_a_form() -> None:
    frame = OwnLines(LogFormat.JSON, has_terminal=False).frame(3, 7, "stderr")
    assert frame

    found = objects(frame(b'a "b" \\ \xff\r\n\n10%\r20%\r\x00end without an end'))

    assert len(objects(frame(b"a whole line\n"))) == 1
    assert [line["text"] for line in found] == ['a "b" \\ �', "", "10%", "20%", "\x00end without an end"]
    assert {(line["generation"], line["rank"], line["stream"]) for line in found} == {(3, 7, "stderr")}
