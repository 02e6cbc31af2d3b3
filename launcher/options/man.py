"""The manual page docs/elaunch.1, from the table of options."""

from __future__ import annotations

from elaunch.launcher.options.rdzv_conf import SETTINGS, Setting
from elaunch.launcher.options.table import TABLE, Group, OptionSpec

EXIT_CODES = (
    ("0", "All workers ended well."),
    ("1", "The job failed; the report says which rank failed first, and how."),
    ("2", "The command line is wrong, or this node does not fit the job."),
    ("3", "The store or an address was not there, or this node does not know how the job ended."),
    ("128 + N", "The job was ended by signal N: 130 for Ctrl-C, 143 for SIGTERM."),
)
_SYNOPSIS = (
    ("", "[options] script.py [args…]"),
    ("", "[options] -m module [args…]"),
    ("", "[options] --no-python command [args…]"),
    ("store", "[--listen HOST:PORT] [--token-file FILE]"),
    ("submit", "slurm|k8s [--dry-run] [options] script.py [args…]"),
    ("doctor", "[--json] [options] [script.py args…]"),
    ("status", "[JOB] [--json] [--ranks]"),
    ("top", "[JOB] [--ranks]"),
    ("stacks", "[JOB] [--json]"),
    ("stop", "JOB"),
    ("restart", "JOB"),
    ("warm", "[--status|--stop] [--json]"),
    ("rehearse", "[--steps N] [--link PATH] [options] script.py [args…]"),
    ("report", "[-o FILE] [--perfetto FILE] [--json] [--metrics FILE] DIR…"),
)
_DESCRIPTION = (
    "elaunch starts a PyTorch training job, one worker per GPU (one worker where there is none), with torchrun's"
    " environment. When a worker fails, elaunch stops the others and starts a new generation of all workers.",
    "An option can be written with _ for -, and shortened while it stays unambiguous. It can also be given as a"
    " variable, or in the job file of --config. The command line wins over variables, and variables over the file.",
    "A script called - is read from stdin.",
    "elaunch status, top and stacks show a running job of this host: once, refreshed each second, and where each rank"
    " is. elaunch stop ends it on all nodes, as Ctrl-C does; elaunch restart starts its workers again. For a job of"
    " other hosts all of them take --rdzv-endpoint, --run-id, --token-file and --rdzv-conf as the job does.",
)
_VARIABLES = (
    ("PET_NAME", "The value of the option --name, as under torchrun: PET_MAX_RESTARTS=1."),
    ("ELAUNCH_ENDPOINT, ETCDCTL_ENDPOINTS", "Where the nodes meet, if --rdzv-endpoint does not say it."),
    ("ELAUNCH_TOKEN", "The job's secret; workers do not get it."),
    (
        "ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY, ETCDCTL_USER, ETCDCTL_PASSWORD",
        "Certificates and credentials for an etcd, if --rdzv-conf does not name them.",
    ),
)
_FILES = (
    ("~/.elaunch/stores/", "Tokens of the stores that this user's elaunch serves now."),
    ("~/.elaunch/key", "The key from which nodes that share a home derive a job's token under a scheduler."),
    ("/tmp/elaunch_*_socket", "The socket of elaunch status; it is removed when the job ends."),
    ("/dev/shm/elaunch_*", "The state that outlives workers; it is removed when the job ends."),
)
_EXAMPLES = (
    ("One worker per GPU, up to 3 restarts:", "elaunch train.py --lr 0.1"),
    ("Four workers, with log files:", "elaunch --nproc-per-node 4 --log-dir logs train.py"),
    ("One of two nodes:", "elaunch --nnodes 2 --rdzv-endpoint node0:2379 train.py"),
    ("How the job of this host is doing:", "elaunch status"),
    ("Four nodes of Slurm:", "srun --nodes=4 --ntasks-per-node=1 elaunch train.py"),
)


def manual() -> str:
    """The page as roff source, in ASCII."""
    lines = [
        '.\\" Made from launcher/options/table.py: python -m elaunch.launcher.options.man > docs/elaunch.1',
        '.TH ELAUNCH 1 "" "elaunch" "User Commands"',
        ".SH NAME",
        roff("elaunch - start PyTorch training jobs and keep them alive"),
        ".SH SYNOPSIS",
    ]
    for command, words in _SYNOPSIS:
        lines += [f".B elaunch {command}".rstrip(), roff(words), ".br"]
    lines += [".SH DESCRIPTION", *"\n.PP\n".join(map(roff, _DESCRIPTION)).split("\n"), ".SH OPTIONS"]
    for group in Group:
        lines.append(f".SS {roff(group.value)}")
        for spec in TABLE:
            if spec.group is group:
                lines += _option(spec)
    lines += [".SH SETTINGS OF THE RENDEZVOUS", roff("Keys of --rdzv-conf, for jobs of several nodes.")]
    for setting in SETTINGS:
        lines += _entry(", ".join(setting.names), _meaning(setting))
    for heading, entries in (("EXIT STATUS", EXIT_CODES), ("ENVIRONMENT", _VARIABLES), ("FILES", _FILES)):
        lines.append(f".SH {heading}")
        for name, text in entries:
            lines += _entry(name, text)
    lines.append(".SH EXAMPLES")
    for text, command in _EXAMPLES:
        lines += [".PP", roff(text), ".PP", ".RS", f".B {roff(command)}", ".RE"]
    lines += [".SH SEE ALSO", ".BR srun (1),", ".BR sbatch (1),", ".BR kubectl (1),", ".BR etcd (1)"]
    return "\n".join(lines) + "\n"


def roff(text: str) -> str:
    """`text` as one line of roff that prints as it is: no request, no escape, no character beyond ASCII."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("~", "\\(ti")
    line = "".join(letter if letter.isascii() else f"\\[u{ord(letter):04X}]" for letter in escaped)
    return f"\\&{line}" if line.startswith(".") else line


def _option(spec: OptionSpec) -> list[str]:
    names = [f"-{spec.short}"] if spec.short else []
    names += [f"--{name}{spec.usage}" for name in spec.names]
    default = f" [{spec.default_text}]" if spec.default_text else ""
    return _entry(", ".join(names), f"{spec.help}{default}")


def _entry(name: str, text: str) -> list[str]:
    return [".TP", f".B {roff(name)}", roff(text)]


def _meaning(setting: Setting) -> str:
    return f"no effect: {setting.no_effect}" if setting.no_effect else setting.help


if __name__ == "__main__":
    print(manual(), end="")
