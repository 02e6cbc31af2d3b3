"""A remembered choice of any content is a sound one or is named, and nothing else happens."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given

from elaunch.trainer.tuning.memory import ChoiceFiles, TunedChoice, TuningKey
from elaunch.trainer.tuning.settings import HOOKS, CommSettings
from tests.fuzzing import bounded, json_texts

KEY = TuningKey("abc", world_size=4, nodes=2, link="gloo", torch="2.13", hooks="bf16 fp16", start="()", about="")
CHOICE = TunedChoice(CommSettings(5, 1, hook="bf16"), start_s=0.5, chosen_s=0.4, passes=40, at=1e9, key=KEY)


@given(text=json_texts(json.dumps({"format": 1, **asdict(CHOICE)})))
def test_a_choice_is_sound_or_is_named(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("choices")
    (folder / KEY.file_name).write_bytes(text.encode(errors="surrogatepass"))

    with bounded():
        found, _, troubles = ChoiceFiles([folder], None).find(KEY)
        elsewhere = ChoiceFiles([folder], None).find_of_run(KEY)

    assert (found is None) == bool(troubles)
    assert elsewhere == found
    if found is not None:
        assert found.key == KEY
        assert found.settings.hook in HOOKS
        assert found.settings.first_bucket_mb > 0
        assert 0 < found.settings.bucket_mb < float("inf")
