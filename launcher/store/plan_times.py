"""Computes the rendezvous's times from the options and the settings of --rdzv-conf."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from elaunch.agent.config import OnHang
from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.options import Options
from elaunch.rendezvous.times import Times

if TYPE_CHECKING:
    from elaunch.launcher.cluster.cluster import Cluster
    from elaunch.launcher.options.rdzv_conf import Conf


def make_times(options: Options, conf: Conf, cluster: Cluster | None) -> Times:
    """The times of a job of several nodes. Raises UsageError if they contradict each other."""
    times = Times.for_lease(
        Times.lease_ttl_s if conf.lease_ttl_s is None else conf.lease_ttl_s,
        failure_grace_s=options.failure_grace,
        stop_grace_s=options.stop_grace,
        last_call_s=Times.last_call_s if conf.last_call_s is None else conf.last_call_s,
        join_timeout_s=conf.join_timeout_s,
        store_timeout_s=conf.store_timeout_s,
        keys_ttl_s=conf.keys_ttl_s,
    )
    if conf.keepalive_s is not None:
        times = replace(times, keepalive_s=min(times.keepalive_s, conf.keepalive_s))
    if cluster and cluster.nodes and cluster.nodes[0] == cluster.nodes[1]:
        times = replace(times, nodes_expected=cluster.nodes[1])
    try:
        times.check()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return with_hang_times(options, times)


def with_hang_times(options: Options, times: Times) -> Times:
    """With what the options say about hangs."""
    limit_s = 0.0 if options.on_hang is OnHang.OFF else options.hang_timeout
    # How long a step may take, only the user knows.
    reports_s = limit_s if "hang_timeout" in options.given else 0.0
    return replace(times, hang_timeout_s=reports_s, hang_after_s=limit_s)
