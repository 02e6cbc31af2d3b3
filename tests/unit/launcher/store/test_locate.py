"""launcher.store.locate: what torchrun's spellings of a rendezvous mean here."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.options import parse
from elaunch.launcher.options.rdzv_conf import SETTINGS
from elaunch.launcher.preflight import read_secret
from elaunch.launcher.store.locate import Planned, RendezvousPlan, plan
from elaunch.rendezvous.endpoint import Endpoint, Login, Tls

TWO = ("--nnodes", "2")


def planned(*argv: str, **environ: str) -> Planned:
    options = parse([*argv, "t.py"], environ)
    return plan(options, environ, lambda path: f"secret of {path}")


def plan_of(*argv: str, **environ: str) -> RendezvousPlan:
    return planned(*argv, **environ).plan


def sentence_of(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as raised:
        planned(*argv, **environ)
    return str(raised.value)


# --- one node


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--standalone", "--rdzv-endpoint", "a:1"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        ("--rdzv-backend", "etcd", "--rdzv-endpoint", "a:2379", "--rdzv-conf", "unknown=knows"),
        ("--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1"),
    ],
)
def test_one_node_is_alone_with_a_store_in_its_memory(argv: tuple[str, ...]) -> None:
    found = plan_of(*argv, ELAUNCH_ENDPOINT="somewhere:1", ETCDCTL_ENDPOINTS="else:2")

    assert found.is_alone
    assert not found.serves


# --- where the store is


def test_no_backend_and_c10d_mean_the_same_store_found_out_or_served_at_the_endpoint() -> None:
    unnamed = plan_of(*TWO, "--rdzv-endpoint", "host0:29400")
    c10d = plan_of(*TWO, "--rdzv-endpoint", "host0", "--rdzv-backend", "c10d")

    assert unnamed == c10d
    assert (c10d.serves, c10d.is_head, c10d.node_rank, c10d.master_addr) == (True, None, None, None)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_etcd_is_one_that_runs_already(backend: str) -> None:
    assert not plan_of(*TWO, "--rdzv-backend", backend, "--rdzv-endpoint", "host0").serves


def test_the_endpoint_may_come_from_variables_of_ours_and_etcdctls() -> None:
    both = {"ELAUNCH_ENDPOINT": "ours:1", "ETCDCTL_ENDPOINTS": "theirs:2"}

    assert plan_of(*TWO, **both).endpoints == (Endpoint("ours", 1),)
    assert plan_of(*TWO, "--rdzv-endpoint", "typed:3", **both).endpoints == (Endpoint("typed", 3),)
    assert plan_of(*TWO, PET_RDZV_ENDPOINT="pet:4", **both).endpoints == (Endpoint("pet", 4),)
    found = planned(*TWO, ETCDCTL_ENDPOINTS="https://a:1,https://b:2")
    assert found.plan.endpoints == (Endpoint("a", 1), Endpoint("b", 2))
    assert found.plan.tls == Tls()
    assert "the store's address comes from ETCDCTL_ENDPOINTS: https://a:1,https://b:2" in found.notes


def test_no_place_to_meet_is_a_sentence_with_the_line_to_type() -> None:
    assert sentence_of("--nnodes", "2:4", "--log-dir", "my logs") == (
        "--nnodes 2:4 needs the address of a store where the nodes meet; type on every node, with the name of one node,"
        " or of an etcd as HOST: elaunch --rdzv-endpoint HOST:2379 --nnodes 2:4 --log-dir 'my logs' t.py"
    )
    assert "elaunch --master-addr HOST --nnodes 2 --node-rank 1 t.py" in sentence_of(*TWO, "--node-rank", "1")
    # etcdctl's variable is not c10d's, which would serve a store on that port.
    assert "needs the address of a store" in sentence_of(*TWO, "--rdzv-backend", "c10d", ETCDCTL_ENDPOINTS="a:1")


# --- static


def test_a_static_job_has_its_master_as_given_and_its_store_one_port_on() -> None:
    argv = (*TWO, "--node-rank", "1", "--master-addr", "host0", "--master-port", "29600")

    found = planned(*argv)

    assert found.plan.endpoints == (Endpoint("host0", 29601),)
    assert (found.plan.node_rank, found.plan.is_head, found.plan.master_addr) == (1, False, "host0")
    assert found.plan.serves
    assert planned(*argv, "--rdzv-backend", "static") == found


# --- secrets


def test_the_token_comes_from_the_typed_file_then_the_variable_then_another_file() -> None:
    place = (*TWO, "--rdzv-endpoint", "a")

    assert plan_of(*place).token == ""
    assert plan_of(*place, ELAUNCH_TOKEN=" t0ken \n").token == "t0ken"
    assert plan_of(*place, "--token-file", "f", ELAUNCH_TOKEN="t0ken").token == "secret of f"
    assert plan_of(*place, PET_TOKEN_FILE="f", ELAUNCH_TOKEN="t0ken").token == "t0ken"
    assert plan_of(*place, PET_TOKEN_FILE="f").token == "secret of f"


def test_no_secret_is_in_a_plans_repr() -> None:
    found = plan_of(
        *TWO, "--rdzv-endpoint", "https://a", "--rdzv-conf", "user=me,password_file=pw", ELAUNCH_TOKEN="hidden-token"
    )

    assert found.login == Login("me", "secret of pw")
    assert "hidden-token" not in repr(found)
    assert "secret of" not in repr(found)


@pytest.mark.parametrize(
    ("conf", "environ", "login"),
    [
        ("", {"ETCDCTL_USER": "root:pw"}, Login("root", "pw")),
        ("", {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": "pw:2"}, Login("root", "pw:2")),
        ("user=me", {"ETCDCTL_USER": "root:pw"}, Login("me", "pw")),
        ("user=me,password_file=f", {"ETCDCTL_PASSWORD": "pw"}, Login("me", "secret of f")),
        ("", {"ETCDCTL_PASSWORD": "pw"}, None),
    ],
)
def test_a_user_of_etcd_is_etcdctls_or_the_settings(conf: str, environ: dict[str, str], login: Login | None) -> None:
    settings = ("--rdzv-conf", conf) if conf else ()

    assert plan_of(*TWO, "--rdzv-endpoint", "https://a", *settings, **environ).login == login


def test_a_secret_is_read_from_its_file_without_the_line_end(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(" abc \n")

    assert read_secret(str(path)) == "abc"
    for text, message in (("", "is empty and should hold a secret"), ("a b", "holds several;")):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_secret(str(path))
    message = r"the secret in .*/nothing cannot be read \(No such file or directory\); give a file"
    with pytest.raises(UsageError, match=message):
        read_secret(str(tmp_path / "nothing"))


# --- certificates


def test_an_empty_certificate_in_a_job_file_leaves_etcdctls_variables(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("rdzv-conf: {cert: '', cacert: ''}\n")
    variables = {"ETCDCTL_CACERT": "ca", "ETCDCTL_CERT": "mine", "ETCDCTL_KEY": "key"}

    tls = plan_of("--config", str(file), *TWO, "--rdzv-endpoint", "https://a", **variables).tls

    assert tls == Tls("ca", "mine", "key")


# --- settings and times


@pytest.mark.parametrize(
    "argv",
    [
        ("--rdzv-endpoint", "a,b,c"),
        ("--rdzv-endpoint", "https://a"),
        ("--rdzv-endpoint", "a", "--rdzv-conf", "transport=grpc"),
    ],
)
def test_an_etcd_is_not_served_and_does_not_use_the_token_with_a_note(argv: tuple[str, ...]) -> None:
    named = (*TWO, "--run-id", "job", *argv)

    (note,) = planned(*named, ELAUNCH_TOKEN="a token of 16 and more").notes

    assert note.startswith("the token is not used: ")
    assert "16 and more" not in note
    assert not plan_of(*named).serves
    assert planned(*named, "--rdzv-backend", "etcd", ELAUNCH_TOKEN="a token of 16 and more").notes == ()


@pytest.mark.parametrize(
    ("endpoint", "conf", "sentence"),
    [
        ("a", "keep_alive_interval=0.2", "etcd's shortest"),
        ("a", "lease_ttl=1", "--rdzv-conf lease_ttl=1 is out of range; give 2 or more"),
        ("a", "join_timeout=soon", "--rdzv-conf join_timeout=soon is not a number of seconds"),
        ("a", "is_host=maybe", "--rdzv-conf is_host=maybe is neither on nor off"),
        ("a", "transport=http3", "--rdzv-conf transport=http3 is not one of gateway, grpc"),
        ("a", "store_type=disk", "--rdzv-conf store_type=disk is not one of tcp, file"),
        (
            "a",
            "join_timout=5",
            "--rdzv-conf join_timout is not a setting of the rendezvous; did you mean join_timeout?",
        ),
        ("a", "xyzzy=5", "known keys: join_timeout, timeout, last_call_timeout"),
        # An endpoint and settings that do not fit.
        ("http://a", "protocol=https", "--rdzv-conf protocol=https contradicts the endpoint http://a"),
        ("http://a", "cacert=f", "--rdzv-conf cacert needs https, and the endpoint is http://a; use https://"),
        ("a", "key=k", "--rdzv-conf key=k has no certificate beside it; add cert=FILE"),
        ("http://a,https://b", "protocol=http", "--rdzv-endpoint mixes http and https"),
        ("a:0", "protocol=http", "--rdzv-endpoint a:0: with port 0 the system chooses the port"),
    ],
)
def test_a_wrong_setting_is_one_sentence(endpoint: str, conf: str, sentence: str) -> None:
    assert sentence in sentence_of(*TWO, "--rdzv-endpoint", endpoint, "--rdzv-conf", conf)


def test_of_two_names_of_one_setting_the_later_counts_and_a_note_names_them_where_they_differ() -> None:
    same, differ = (
        planned(*TWO, "--rdzv-endpoint", "a", "--rdzv-conf", f"join_timeout=5,timeout={timeout}") for timeout in (5, 6)
    )

    assert (same.plan.times.join_timeout_s, same.notes) == (5, ())
    assert differ.plan.times.join_timeout_s == 6
    assert "has join_timeout=5 and timeout=6, two names of one setting" in differ.notes[0]


def test_every_setting_of_torchs_backends_is_known() -> None:
    theirs = {
        *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout", "timeout"),
        *("keep_alive_interval", "keep_alive_max_attempt", "is_host", "store_type", "etcd_prefix", "protocol"),
        *("cert", "key", "cacert", "ssl_cert", "ssl_cert_key", "ca_cert"),
    }

    assert theirs <= {name for setting in SETTINGS for name in setting.names}


@pytest.mark.parametrize("typed", ["/teams/vision/", "teams/vision", "//teams//vision//", " /teams/vision "])
def test_the_prefix_of_the_keys_is_the_same_however_its_slashes_are_typed(typed: str) -> None:
    found = plan_of(*TWO, "--rdzv-endpoint", "a", "--rdzv-conf", f"etcd_prefix={typed}")

    assert found.prefix == "/teams/vision/"


@pytest.mark.parametrize("quote", ["'", '"'])
def test_settings_whose_quotes_no_shell_has_taken_off_are_read(quote: str) -> None:
    settings = f" {quote}lease_ttl=4,join_timeout=100{quote}"

    times = plan_of(*TWO, "--rdzv-endpoint", "a", "--rdzv-conf", settings).times

    assert (times.lease_ttl_s, times.join_timeout_s) == (4, 100)
    with pytest.raises(UsageError, match=r"^--rdzv-conf 'lease_ttl is not a setting"):
        plan_of(*TWO, "--rdzv-endpoint", "a", "--rdzv-conf", "'lease_ttl=4")
