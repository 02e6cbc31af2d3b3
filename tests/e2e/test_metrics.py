"""--metrics-port in a real job: what is exposed, what the dashboard asks for, and a real Prometheus in between."""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import REPOSITORY, Job, finished, script, wait_for

pytestmark = pytest.mark.usefixtures("without_torch")

DASHBOARD = json.loads((REPOSITORY / "deploy" / "grafana" / "elaunch.json").read_text())
# Fails once, then trains until the file `enough` is there.
TRAINS = """
import os, time
from elaunch.trainer import link

generation = int(os.environ["ELAUNCH_GENERATION"])
for step in range(10 * generation, 10_000):
    link.report(step)
    time.sleep(0.06)
    if generation == 0 and step == 12 and os.environ["RANK"] == "1":
        raise ValueError("the loss is NaN")
    if os.path.exists("enough"):
        break
"""
JOB = ("--no-preload", "--run-id", "night", "--nproc-per-node", "2", "--metrics-port", "0", "train.py")


def get(place: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(place, timeout=180) as answer:
        return str(answer.read().decode())


def expressions() -> list[str]:
    """All of the dashboard's expressions, for the job `night`."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    notes = [note["expr"] for note in DASHBOARD["annotations"]["list"]]
    return [expression.replace("$run_id", "night") for expression in (*panels, *notes)]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, str]]:
    """A job in its second generation, and where its metrics are."""
    folder = tmp_path_factory.mktemp("training")
    script(folder, TRAINS)
    with Job(folder, *JOB) as job:
        place = job.wait_for_output(r"^elaunch: metrics of this node: (http://127\.0\.0\.1:\d+/metrics)$")[1]
        job.wait_for_output(r"^elaunch: generation 1:")
        # The first look at the second generation's steps finds those that are repeated.
        wait_for(lambda: re.search(r"elaunch_steps_repeated_total{.*} [1-9]", get(place)), "steps", every_s=0.05)
        yield job, place
        (folder / "enough").touch()
        assert job.wait() == 0, job.output


def test_a_failed_and_restarted_job_shows_both(training: tuple[Job, str]) -> None:
    samples = dict(line.rsplit(" ", 1) for line in get(training[1]).splitlines() if not line.startswith("#"))

    own = 'node="([^"]+)",run_id="night"'
    values = {re.sub(own, "", name): float(value) for name, value in samples.items()}
    assert values["elaunch_generation{}"] == 1
    assert values["elaunch_restarts_total{}"] == 1
    assert values['elaunch_failures_total{kind="exception",}'] == 1
    assert values['elaunch_workers{,state="running"}'] == values["elaunch_world_size{}"] == 2
    assert values["elaunch_node_up{}"] == values["elaunch_store_reachable{}"] == 1
    assert values['elaunch_time_seconds_total{,use="productive"}'] > 0
    assert values["elaunch_steps_repeated_total{}"] >= 2


def test_the_dashboard_queries_only_metrics_that_a_real_run_has(training: tuple[Job, str]) -> None:
    exposed = set(re.findall(r"^(elaunch_\w+)", get(training[1]), re.MULTILINE))
    asked = {name for expression in expressions() for name in re.findall(r"elaunch_\w+", expression)}

    assert len(asked) >= 15
    assert asked <= exposed
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) == variables


def test_the_page_lists_the_metrics_of_a_real_run(training: tuple[Job, str]) -> None:
    exposed = set(re.findall(r"^(elaunch_\w+)", get(training[1]), re.MULTILINE))
    page = (REPOSITORY / "docs" / "observe.md").read_text()

    assert exposed == set(re.findall(r"^- `(elaunch_\w+)", page, re.MULTILINE))


def test_a_port_that_is_taken_ends_the_command_at_once(training: tuple[Job, str], tmp_path: Path) -> None:
    port = re.findall(r":(\d+)/", training[1])[0]
    script(tmp_path, "print('started')")

    job = finished(tmp_path, "--no-preload", "--metrics-port", port, "train.py")

    assert job.code == 2
    assert re.fullmatch(
        rf"elaunch: --metrics-port {port}: 127\.0\.0\.1:{port} cannot be served \(Address already in use\); .*\n",
        job.stderr,
    )
