"""Two teams on one etcd, each with a user, a role for a prefix, and a job of the same name."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from elaunch.rendezvous.endpoint import Access, Login, Tls
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.store import Denied, Put, Txn
from tests.certificates import Certificates
from tests.etcd import Etcd
from tests.faults.processes import Light, Watched
from tests.harness import DEADLINE_S, REPOSITORY, wait_for

TEAMS = ("vision", "nlp")
# The commands that an administrator types for each team, from docs/operations.md.
RECIPE = (
    "role add {team}",
    "role grant-permission {team} readwrite /teams/{team}/ --prefix=true",
    "user grant-role {team} {team}",
)
PAGE = REPOSITORY / "docs" / "operations.md"
UNTIL_END = """
import os, pathlib, sys, time
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(sys.argv) > 2:
    # Longer than a lease: by then all requests of a job have been made, those that only look too.
    time.sleep(float(sys.argv[2]))
    raise SystemExit("once")
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


class Teams:
    """The etcd, and the options that a member of each team types."""

    def __init__(self, etcd: Etcd, certificates: Certificates, folder: Path) -> None:
        self.etcd, self.folder = etcd, folder
        self.end = folder / "end"
        self._certificates = certificates
        (folder / "train.py").write_text(UNTIL_END)
        for team in TEAMS:
            etcd.ctl("user", "add", f"{team}:word-of-{team}")
            (folder / team).write_text(f"word-of-{team}\n")
            for line in RECIPE:
                etcd.ctl(*line.format(team=team).split())

    def key_names(self) -> list[str]:
        """The names of all keys, as root sees them."""
        return self.etcd.ctl("get", "--prefix", "--keys-only", "/").split()

    @contextmanager
    def agent(self, team: str, *args: str, under: str) -> Iterator[Watched]:
        """A node of the team's job `job`, of two nodes, with its keys under that prefix; `args` are the program's."""
        home = self.folder / f"{team}-{len(list(self.folder.iterdir()))}"
        home.mkdir()
        files = self._certificates
        conf = {
            "cacert": files.ca, "cert": files.client, "key": files.client_key, "user": team,
            "password_file": self.folder / team, "etcd_prefix": under,
        }  # fmt: skip
        words = ("--nnodes", "2", "--run-id", "job", "--rdzv-endpoint", self.etcd.endpoints)
        settings = ",".join(f"{name}={value}" for name, value in conf.items())
        program = ("--nproc-per-node", "1", str(self.folder / "train.py"), str(self.end), *args)
        with Light(home, *words, "--rdzv-conf", settings, *program) as agent:
            yield agent

    def store(self, team: str) -> EtcdStore:
        files = self._certificates
        tls = Tls(str(files.ca), str(files.client), str(files.client_key))
        return EtcdStore(self.etcd.addresses, Access(tls, Login(team, f"word-of-{team}")), DEADLINE_S)


@pytest.fixture
def teams(tmp_path: Path) -> Iterator[Teams]:
    certificates = Certificates(tmp_path / "certificates")
    with Etcd("3.5", tls=certificates, client_certificates=True, users={"somebody": "x"}) as etcd:
        yield Teams(etcd, certificates, tmp_path)


def test_the_recipe_is_the_documentations() -> None:
    page = PAGE.read_text()

    for line in RECIPE:
        assert f"etcdctl {line.format(team='vision')}\n" in page


def test_jobs_of_one_name_under_two_prefixes_do_not_meet_and_neither_team_reads_the_others_keys(teams: Teams) -> None:
    with (
        teams.agent("vision", under="/teams/vision") as first,
        teams.agent("vision", under="teams/vision/") as second,
        teams.agent("nlp", under="/teams/nlp/") as alone,
    ):
        for agent in (first, second):
            agent.wait_for_output("generation 0: 2 workers on 2 nodes")
        alone.wait_for_output(r"waiting for nodes: 1 of 2 is here under etcd_prefix=/teams/nlp/ \(gives up")
        roots = {key.partition("/job/")[0] for key in teams.key_names()}
        assert roots == {"/teams/vision", "/teams/nlp"}

        for team, other in (TEAMS, TEAMS[::-1]):
            with closing(teams.store(team)) as store:
                assert store.read(f"/teams/{team}/").entries
                for prefix in (f"/teams/{other}/", "/teams/", f"/teams/{other}/job/ctl/leader"):
                    with pytest.raises(Denied):
                        store.read(prefix)
                with pytest.raises(Denied):
                    store.commit(Txn((), (Put(f"/teams/{other}/job/ctl/ended", "mine"),)))

        teams.end.touch()
        assert (first.wait(), second.wait()) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.4", "3.5"])
def test_a_role_for_the_prefix_is_enough_for_all_requests_of_a_job(tmp_path: Path, version: str) -> None:
    certificates = Certificates(tmp_path / "certificates")
    with Etcd(version, tls=certificates, client_certificates=True, users={"somebody": "x"}) as etcd:
        teams = Teams(etcd, certificates, tmp_path)
        with (
            teams.agent("vision", "5", under="/teams/vision") as first,
            teams.agent("vision", "5", under="/teams/vision") as second,
        ):
            for agent in (first, second):
                agent.wait_for_output("generation 1: 2 workers on 2 nodes")
            teams.end.touch()
            codes = first.wait(), second.wait()

            assert codes == (0, 0), first.output + second.output
            assert "the store" not in first.stderr + second.stderr


def test_a_job_under_another_teams_prefix_is_refused_in_seconds_with_user_and_prefix(teams: Teams) -> None:
    began_s = time.monotonic()
    with teams.agent("vision", under="/teams/nlp") as agent:
        code = agent.wait()

    assert code == 2
    assert time.monotonic() - began_s < 120
    assert re.search(r"user 'vision' may not use .*/teams/nlp/", agent.stderr)
    assert wait_for(lambda: not teams.key_names(), "no key of it")
