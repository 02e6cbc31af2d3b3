"""A function's configuration has torch's fields, and becomes options that the command takes."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.launcher.functions.launch import LaunchConfig, as_ours, launch, option_words
from elaunch.launcher.options.options import Options, parse


@pytest.fixture(autouse=True)
def torchs_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a folder for each of its configurations, and leaves it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def options(**fields: Any) -> Options:
    given = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, **fields}
    parsed = parse([*option_words(LaunchConfig(**given)), "train.py"], {})
    assert isinstance(parsed, Options)
    return parsed


def test_the_fields_their_order_and_their_defaults_are_those_of_torch() -> None:
    from torch.distributed.launcher.api import LaunchConfig as Torchs

    ours, theirs = (
        {field.name: (field.default, field.default_factory) for field in dataclasses.fields(config)}
        for config in (LaunchConfig, Torchs)
    )

    # A newer torch may have more. They are asked for by name, and refused then.
    assert list(ours)[:-1] == [name for name in theirs if name in ours]
    assert {name: default for name, default in ours.items() if name in theirs}.items() <= theirs.items()
    assert list(ours)[-1] == "options"


def test_a_configuration_of_torchs_own_means_the_same() -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig as Torchs
    from torch.numa.binding import AffinityMode, NumaOptions

    fields: dict[str, Any] = {
        "min_nodes": 2,
        "max_nodes": 4,
        "nproc_per_node": 3,
        "logs_specs": DefaultLogsSpecs(log_dir=os.devnull, redirects=Std.OUT, tee={0: Std.ERR}, local_ranks_filter={0}),
        "run_id": "job",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "node0:29400",
        "numa_options": NumaOptions(AffinityMode.CORE_COMPLEX),
    }

    assert option_words(as_ours(Torchs(**fields))) == option_words(LaunchConfig(**fields))
    read = options(**fields)
    assert read.numa_binding is not None
    assert read.numa_binding.value == "core-complex"
    assert read.local_ranks_filter == {0}
    assert read.log_dir is None


def test_the_configuration_of_an_older_torch_has_the_defaults_of_the_fields_that_it_lacks() -> None:
    """torch 2.6 had neither signals, filters, NUMA, a virtual local rank nor a time to stop."""
    with_all = LaunchConfig(1, 1, 2, run_id="job")
    newer = (
        "event_log_handler",
        "numa_options",
        "signals_to_handle",
        "shutdown_timeout",
        "virtual_local_rank",
        "options",
    )
    newer += ("duplicate_stdout_filters", "duplicate_stderr_filters")
    older = SimpleNamespace(**{name: value for name, value in vars(with_all).items() if name not in newer})

    call = launch(older, print)  # type: ignore[arg-type]

    assert call._config == with_all
