"""rendezvous.etcd.json_codec: what the contract suite on real etcd can't tell apart."""

from __future__ import annotations

import base64

from elaunch.rendezvous.etcd import json_codec
from elaunch.rendezvous.etcd.transport import Json
from elaunch.rendezvous.store import Absent, Txn

KEY = base64.b64encode(b"/a").decode()


def event(revision: int, **kv: str) -> Json:
    return {"kv": {"key": KEY, "create_revision": "1", "mod_revision": str(revision), **kv}}


def test_a_transaction_of_guards_alone_is_made_a_read_that_the_members_agree_on() -> None:
    request = json_codec.commit(Txn((Absent("/a"),)))

    # etcd answers from the member at hand if all operations are serializable, which none are.
    assert request["success"]
    assert request["failure"]
    for op in request["success"] + request["failure"]:
        assert "serializable" not in op["request_range"]
        # The read returns only a count: a read of values could crash an etcd before 3.5.5 (see json_codec.read).
        assert op["request_range"]["count_only"]


def test_a_watch_begins_at_the_last_revision_known_and_leaves_that_one_out() -> None:
    request = json_codec.watch("/a", 7)
    told = json_codec.changes({"events": [event(7, value=""), event(8), event(8, value="eA=="), event(9)]}, 7)

    assert request["create_request"]["start_revision"] == "7"
    assert [changes.revision for changes in told] == [8, 9]


def test_a_value_that_is_no_text_is_kept_as_it_is() -> None:
    view = json_codec.view({"header": {"revision": "3"}, "kvs": [event(2, value="/w==")["kv"]]})

    assert view.entries["/a"].value.encode("utf-8", "surrogateescape") == b"\xff"


def test_a_range_ends_behind_its_last_key() -> None:
    assert json_codec.range_end("/a/") == b"/a0"
    assert json_codec.range_end("é") > "é\U0010ffff".encode()
    assert json_codec.range_end("") == b"\0"
