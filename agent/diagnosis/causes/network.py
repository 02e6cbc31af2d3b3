"""Causes: NCCL, gloo, the process group and its store; nodes that differ."""

from __future__ import annotations

from elaunch.agent.diagnosis.causes.cause import CauseRule

COLLECTIVES_RULES = (
    CauseRule(
        "NCCL watchdog: a collective timed out",
        "one rank did not enter this collective: compare the operation and its number between the ranks' output,"
        " check the rank that reports none, and start with --hang-timeout, which shows the stacks",
        pattern=(
            r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+)"
            r"[^\n]*?Timeout\(ms\)=(?P<ms>\d{1,12})"
        ),
        detail="{operation}, number {number} on its process group, was not done after {seconds} s",
        more=lambda _, values: {"seconds": f"{int(values['ms']) / 1000:g}"},
    ),
    CauseRule(
        "two ranks on one GPU",
        "choose the GPU by LOCAL_RANK before init_process_group: torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        pattern=r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device",
        detail="rank {one} and rank {other} use the same GPU",
    ),
    CauseRule(
        "NCCL finds no network interface",
        "set NCCL_SOCKET_IFNAME to an interface of every node (ip -br addr shows them), or unset it",
        pattern=r"no socket interface found|Bootstrap : no interface",
    ),
    CauseRule(
        "the nodes have different versions of NCCL",
        "install the same torch, and so the same NCCL, on every node (torch.cuda.nccl.version())",
        pattern=r"mismatch\w* NCCL versions?|NCCL version mismatch",
    ),
    CauseRule(
        "NCCL: invalid usage",
        "ranks use NCCL in different ways (another GPU, dtype, size or order of calls): NCCL_DEBUG=WARN names the call",
        pattern=r"ncclInvalidUsage|ncclInvalidArgument",
    ),
    CauseRule(
        "NCCL: a system or CUDA call failed",
        "NCCL_DEBUG=INFO names the call that failed: most often the network between the nodes (NCCL_SOCKET_IFNAME,"
        " firewall), locked memory (ulimit -l) or /dev/shm",
        pattern=r"ncclSystemError|unhandled system error|ncclUnhandledCudaError|unhandled cuda error",
    ),
    CauseRule(
        "gloo finds no such network interface",
        "set GLOO_SOCKET_IFNAME to an interface of this node (ip -br addr shows them), or unset it: elaunch finds one",
        pattern=r"Unable to find (?:address for|interface for|interface):? ?(?P<name>[^\s\"]*)",
    ),
    CauseRule(
        "the ranks cannot reach each other",
        "the workers could not connect to each other: open the ports between the nodes, and set GLOO_SOCKET_IFNAME to"
        " the interface that connects them",
        # Gloo's text, and that of the Keeper's own connections.
        pattern=r"connectFullMesh failed|connection closed by peer \(Connection timed out, at [0-9a-f.:]+ port \d",
    ),
    CauseRule(
        "a collective timed out",
        "one rank did not enter this collective: check the rank whose output does not show it, and start with"
        " --hang-timeout, which shows the stacks",
        # Gloo's text, and that of the Keeper's own connections.
        pattern=(
            r"Timed out waiting \d+ms for (?:recv|send) operation"
            r"|collective operation timeout: waited \d[\d.e+]{0,12} s for"
        ),
    ),
    CauseRule(
        "not all ranks joined the process group",
        "not all ranks called init_process_group: leave rank= and world_size= out of it, since elaunch sets RANK and"
        " WORLD_SIZE; or find the rank that did not call it",
        pattern=(
            r"waiting for clients\. (?P<joined>\d+)/(?!(?P=joined) )\d+ clients joined"
            r"|wait timeout after \d+ms, keys: \S*default_pg\S*"
        ),
    ),
    CauseRule(
        "a name that cannot be resolved",
        "the host name is not known here: check its spelling and DNS or /etc/hosts on this node, or give an address",
        pattern=(
            r"Name or service not known|Temporary failure in name resolution|No address associated with hostname"
            r"|gai error: -[235]\b|nodename nor servname"
        ),
    ),
    CauseRule(
        "the process group's store cannot be reached",
        "no store answers at that address. The workers meet at MASTER_ADDR:MASTER_PORT, which elaunch sets: no firewall"
        " may block that port between the nodes. At another port a rank has to serve a store (is_master=True), and to"
        " live until the others have connected; a process that a rank starts can do so only while"
        " TORCHELASTIC_USE_AGENT_STORE is False in its environment",
        pattern=r"client socket has (?:failed to connect|timed out)",
    ),
    CauseRule(
        "no process group yet",
        "call torch.distributed.init_process_group() before the first collective, in every rank",
        pattern=r"Default process group has not been initialized",
    ),
    CauseRule(
        "the ranks disagree about the model (DDP)",
        "the ranks' models differ, or their calls come in another order: build the same model in each rank",
        pattern=r"DDP expects same model across all ranks|params? .{0,80} appears not to match (?:sizes|strides)",
    ),
    CauseRule(
        "parameters without gradients (DDP)",
        "give DistributedDataParallel find_unused_parameters=True, or use all outputs of forward in the loss",
        pattern=r"Expected to have finished reduction in the prior iteration",
    ),
)


NODES_RULES = (
    CauseRule(
        "a failure between ranks, where the nodes have different versions of torch or Python",
        "{mismatch}: install the same on every node",
        pattern=r"nccl|gloo|pickle|processgroup|process group|collective",
        more=lambda evidence, _: {"mismatch": evidence.facts.mismatch} if evidence.facts.mismatch else None,
        shown="install the same versions on every node; a warning names the versions and the nodes when the ranks"
        " start",
    ),
)
