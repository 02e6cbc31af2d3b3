"""JSON as etcd v3's gateway reads and writes it, for the server.

Bytes are base64, 64-bit numbers are strings, and zero fields are left out.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

from elaunch.rendezvous.codec import parse_first_json
from elaunch.rendezvous.engine.mvcc import KeyValue, Refused
from elaunch.rendezvous.engine.requests import (
    Compare,
    DeleteAnswer,
    DeleteRequest,
    OpAnswer,
    OpRequest,
    PutAnswer,
    PutRequest,
    RangeAnswer,
    RangeRequest,
    Result,
    Target,
    TxnAnswer,
    TxnRequest,
)

Json = dict[str, Any]
EnumType = TypeVar("EnumType", bound=IntEnum)

_INVALID, _UNIMPLEMENTED = 3, 12


class Fields:
    """The fields of one object in a request. Every method raises Refused if the object is not valid."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise Refused(_INVALID, f"{what} is no JSON object")
        self._fields = {name: field for name, field in value.items() if field is not None}
        self._what = what

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get_bytes(self, name: str) -> bytes:
        value = self._fields.pop(name, "")
        try:
            return b64decode(value, validate=True)
        except (TypeError, ValueError):
            raise Refused(_INVALID, f"illegal base64 data in {name} of {self._what}") from None

    def get_int(self, name: str) -> int:
        value = self._fields.pop(name, 0)
        try:
            # int() would accept a float, and true.
            number = int(value) if type(value) in (int, str) else None
        except ValueError:
            number = None
        if number is None or not -(2**63) <= number < 2**63:
            raise Refused(_INVALID, f"{name} of {self._what} is no 64-bit number")
        return number

    def get_bool(self, name: str) -> bool:
        value = self._fields.pop(name, False)
        if not isinstance(value, bool):
            raise Refused(_INVALID, f"{name} of {self._what} is neither true nor false")
        return value

    def get_enum(self, name: str, kind: type[EnumType]) -> EnumType:
        value = self._fields.pop(name, 0)
        try:
            return kind[value] if isinstance(value, str) else kind(value)
        except (KeyError, ValueError):
            raise Refused(_INVALID, f"{name} of {self._what} has no such value") from None

    def get_object(self, name: str) -> Fields:
        return Fields(self._fields.pop(name, {}), name)

    def get_objects(self, name: str) -> list[Fields]:
        value = self._fields.pop(name, [])
        if not isinstance(value, list):
            raise Refused(_INVALID, f"{name} of {self._what} is no JSON array")
        return [Fields(item, name) for item in value]

    def done(self) -> None:
        """Raises Refused if a field is left. etcd ignores unknown fields, but here etcd may know such a field."""
        if self._fields:
            raise Refused(_UNIMPLEMENTED, f"elaunch's store does not do {', '.join(self._fields)} of {self._what}")


def read_json(text: bytes) -> Fields:
    """The first JSON value of a request's body, which may be empty."""
    try:
        value = parse_first_json(text.strip() or b"{}")
    except ValueError as error:
        raise Refused(_INVALID, f"not JSON: {error}") from None
    return Fields(value, "the request")


def write_json(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def range_request(fields: Fields) -> RangeRequest:
    # All reads are linearizable here: there is one member.
    fields.get_bool("serializable")
    request = RangeRequest(
        fields.get_bytes("key"),
        fields.get_bytes("range_end"),
        fields.get_int("limit"),
        fields.get_int("revision"),
        fields.get_bool("keys_only"),
        fields.get_bool("count_only"),
    )
    fields.done()
    return request


def put_request(fields: Fields) -> PutRequest:
    request = PutRequest(
        fields.get_bytes("key"), fields.get_bytes("value"), fields.get_int("lease"), fields.get_bool("prev_kv")
    )
    fields.done()
    return request


def delete_request(fields: Fields) -> DeleteRequest:
    request = DeleteRequest(fields.get_bytes("key"), fields.get_bytes("range_end"), fields.get_bool("prev_kv"))
    fields.done()
    return request


def txn_request(fields: Fields) -> TxnRequest:
    request = TxnRequest(
        tuple(map(_compare, fields.get_objects("compare"))),
        tuple(map(_operation, fields.get_objects("success"))),
        tuple(map(_operation, fields.get_objects("failure"))),
    )
    fields.done()
    return request


def range_answer(answer: RangeAnswer) -> Json:
    return nonzero(kvs=[kv_json(kv) for kv in answer.kvs], more=answer.more, count=answer.total)


def put_answer(answer: PutAnswer) -> Json:
    return {"prev_kv": kv_json(answer.prev_kv)} if answer.prev_kv else {}


def delete_answer(answer: DeleteAnswer) -> Json:
    return nonzero(deleted=answer.deleted, prev_kvs=[kv_json(kv) for kv in answer.prev_kvs])


def txn_answer(answer: TxnAnswer) -> Json:
    return nonzero(succeeded=answer.succeeded, responses=[_response(part) for part in answer.answers])


def events_json(events: Sequence[KeyValue]) -> list[Json]:
    """The events of a watch's answer."""
    return [{"kv": kv_json(kv)} if kv.version else {"type": "DELETE", "kv": kv_json(kv)} for kv in events]


def kv_json(kv: KeyValue) -> Json:
    return nonzero(
        key=b64encode(kv.key).decode(),
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        version=kv.version,
        value=b64encode(kv.value).decode(),
        lease=kv.lease,
    )


def lease_json(lease: int, ttl_s: int, granted_ttl_s: int, keys: Sequence[bytes]) -> Json:
    return nonzero(ID=lease, TTL=ttl_s, grantedTTL=granted_ttl_s, keys=[b64encode(key).decode() for key in keys])


def nonzero(**fields: Any) -> Json:
    """The fields that are not zero, numbers as strings."""
    # A bool is an int too, but stays a bool.
    return {name: str(value) if type(value) is int else value for name, value in fields.items() if value}


def _compare(fields: Fields) -> Compare:
    target, result = fields.get_enum("target", Target), fields.get_enum("result", Result)
    key, end = fields.get_bytes("key"), fields.get_bytes("range_end")
    operand: bytes | int
    match target:
        case Target.VALUE:
            operand = fields.get_bytes("value")
        case Target.VERSION:
            operand = fields.get_int("version")
        case Target.CREATE:
            operand = fields.get_int("create_revision")
        case Target.MOD:
            operand = fields.get_int("mod_revision")
        case Target.LEASE:
            operand = fields.get_int("lease")
    fields.done()
    return Compare(target, result, key, end, operand)


def _operation(fields: Fields) -> OpRequest:
    if "request_put" in fields:
        request: OpRequest = put_request(fields.get_object("request_put"))
    elif "request_range" in fields:
        request = range_request(fields.get_object("request_range"))
    elif "request_delete_range" in fields:
        request = delete_request(fields.get_object("request_delete_range"))
    else:
        fields.done()
        # etcd's words for an operation of no kind.
        raise Refused(_INVALID, "etcdserver: key not found")
    fields.done()
    return request


def _response(answer: OpAnswer) -> Json:
    header = {"header": {"revision": str(answer.revision)}}
    match answer:
        case PutAnswer():
            return {"response_put": {**header, **put_answer(answer)}}
        case RangeAnswer():
            return {"response_range": {**header, **range_answer(answer)}}
        case DeleteAnswer():
            return {"response_delete_range": {**header, **delete_answer(answer)}}
