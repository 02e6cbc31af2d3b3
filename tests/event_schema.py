"""Checks events against docs/events.schema.json, and more strictly than readers should: nothing unknown is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from tests.harness import REPOSITORY

SCHEMA: dict[str, Any] = json.loads((REPOSITORY / "docs" / "events.schema.json").read_text())
# `failure` is a part of events.
EVENTS = SCHEMA["$defs"].keys() - {"failure"}


@cache
def _strict() -> Any:
    import jsonschema

    schema = deepcopy(SCHEMA) | {"unevaluatedProperties": False}
    schema["properties"]["event"]["enum"] = sorted(EVENTS)
    for event in schema["$defs"].values():
        for field in event.get("properties", {}).values():
            if "$ref" in field:
                field["unevaluatedProperties"] = False
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def check_event(line: Mapping[str, Any]) -> None:
    """Fails with what is wrong, and where, if the line is not one of the documented events."""
    wrong = [f"{error.json_path}: {error.message}" for error in _strict().iter_errors(line)]
    assert not wrong, (line, wrong)
