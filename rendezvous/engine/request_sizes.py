"""The size of a request in bytes as protocol buffers (api/etcdserverpb/rpc.proto).

etcd applies its limits to this size.
"""

from __future__ import annotations

from elaunch.rendezvous.engine.requests import (
    Compare,
    DeleteRequest,
    OpRequest,
    PutRequest,
    RangeRequest,
    Target,
    TxnRequest,
)

# etcd's --max-request-bytes, and the larger limit of its gRPC.
REQUEST_BYTES_MAX = 3 << 19
MESSAGE_BYTES_MAX = REQUEST_BYTES_MAX + (512 << 10)
# etcd's log adds this to a request: the member's own number for it, and lengths.
LOG_BYTES = 18


def txn_bytes(txn: TxnRequest) -> int:
    compared = sum(_message(_compare_bytes(each)) for each in txn.compare)
    return compared + sum(_message(_message(request_bytes(each))) for each in (*txn.success, *txn.failure))


def request_bytes(request: OpRequest) -> int:
    match request:
        case PutRequest():
            return _put_bytes(request)
        case RangeRequest():
            return _range_bytes(request)
        case DeleteRequest():
            return _delete_bytes(request)


def _put_bytes(put: PutRequest) -> int:
    return _bytes(put.key) + _bytes(put.value) + _number(put.lease) + _flag(put.prev_kv)


def _range_bytes(asked: RangeRequest) -> int:
    keys, numbers = _bytes(asked.key) + _bytes(asked.end), _number(asked.limit) + _number(asked.revision)
    return keys + numbers + _flag(asked.keys_only) + _flag(asked.count_only)


def _delete_bytes(delete: DeleteRequest) -> int:
    return _bytes(delete.key) + _bytes(delete.end) + _flag(delete.prev_kv)


def _compare_bytes(compare: Compare) -> int:
    # A field with a number above 15 has a tag of two bytes. A field of a oneof is written even if it is zero.
    end = _bytes(compare.end) + 1 if compare.end else 0
    if compare.target is Target.VALUE:
        assert isinstance(compare.value, bytes)
        operand = _message(len(compare.value))
    else:
        assert isinstance(compare.value, int)
        operand = 1 + _varint(compare.value)
    return _number(compare.result) + _number(compare.target) + _bytes(compare.key) + end + operand


def _message(length: int) -> int:
    return 1 + _varint(length) + length


def _bytes(value: bytes) -> int:
    return _message(len(value)) if value else 0


def _number(value: int) -> int:
    return 1 + _varint(value) if value else 0


def _flag(value: bool) -> int:
    return 2 if value else 0


def _varint(value: int) -> int:
    # Seven bits a byte; a negative number is as long as the largest.
    return max(-(-(value & (2**64 - 1)).bit_length() // 7), 1)
