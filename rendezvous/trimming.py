"""placeholder until w1's"""

from elaunch.rendezvous.store import Txn


def trimmed(txn: Txn) -> Txn | None:
    return None
