"""LSF: processes that `blaunch` or `jsrun` starts on the hosts of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elaunch.launcher.cluster.cluster import Cluster, number, port_of_name, used
from elaunch.launcher.cluster.schedulers.hostlist import of_lsf, place_of


def detect(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts that LSF gives a process. `blaunch` sets no node index, so the host's name in the list gives it.

    Raises ValueError if this host is not in the list.
    """
    job = number(environ, "LSB_JOBID")
    if job is None:
        return None
    hosts = of_lsf(environ)
    index = place_of(hostname, hosts) if len(hosts) > 1 else 0
    if index is None:
        raise ValueError(f"this host, {hostname}, is none of those in LSB_MCPU_HOSTS: {' '.join(hosts)}")
    array = number(environ, "LSB_JOBINDEX") or 0
    run_id = f"lsf-{job}_{array}" if array else f"lsf-{job}"
    is_by_hand = len(hosts) > 1 and "JSM_NAMESPACE_RANK" not in environ
    return Cluster(
        "LSF",
        nodes=(max(len(hosts), 1),) * 2,
        node_index=index,
        head=hosts[0] if len(hosts) > 1 else None,
        head_port=port_of_name(run_id),
        run_id=run_id,
        task=number(environ, "JSM_NAMESPACE_LOCAL_RANK") or 0,
        tasks=number(environ, "JSM_NAMESPACE_LOCAL_SIZE") or 1,
        sources=used(environ, "LSB_JOBID", "LSB_JOBINDEX", "LSB_MCPU_HOSTS", "JSM_NAMESPACE_LOCAL_RANK"),
        note=f'every host is to start it once: blaunch -z "{" ".join(hosts)}" elaunch …' if is_by_hand else "",
    )
