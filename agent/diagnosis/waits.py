"""Classifies a stack's wait: collective, store, lock, data loader, file, network, person; pure.

Two things show it: the frames between the user's code and the end of the stack, and the system call that the thread
sleeps in. A C function has no frame of its own (py-spy shows Python's), so `lock.acquire()` in the user's code is known
by its system call alone.
"""

from __future__ import annotations

from enum import Enum

from elaunch.agent.diagnosis.stack_groups import Stack, ThreadStack, called_frame, location_text


class Doing(Enum):
    """The activity of a rank's main thread; the value is a verb phrase about the rank."""

    COLLECTIVE = "waits in a collective"
    RENDEZVOUS = "waits for the other ranks to make the process group"
    LOADER = "waits for its data loader"
    LOCK = "waits for a lock or for another thread"
    END = "waits for its other threads, at the end of its program"
    CHILD = "waits for a child process"
    GPU = "waits for the GPU"
    SLEEP = "sleeps"
    FILE = "waits for a file"
    NETWORK = "waits for the network"
    PROMPT = "waits for a person at a prompt"
    OTHER = "waits"
    RUNS = "runs"
    STOPPED = "is stopped by a signal (SIGSTOP)"
    TRACED = "is stopped by a debugger"
    UNKNOWN = "shows no stack"

    @property
    def is_for_ranks(self) -> bool:
        return self in (Doing.COLLECTIVE, Doing.RENDEZVOUS)


_RENDEZVOUS_FUNCTIONS = {"init_process_group", "rendezvous", "_store_based_barrier", "new_group", "init_device_mesh"}
_RENDEZVOUS_FILE = "torch/distributed/rendezvous.py"
# A backward pass that sleeps: on a CPU it runs in this thread, and DDP waits there for the gradients' all-reduce.
BACKWARD = ("_engine_run_backward", "torch/autograd/graph.py")
COLLECTIVES_FILE = "torch/distributed/distributed_c10d.py"
# Not torch/distributed/checkpoint/, which waits for files.
_COLLECTIVE_FILES = (
    COLLECTIVES_FILE,
    "torch/nn/parallel/distributed.py",
    *(f"torch/distributed/{name}" for name in ("_functional_collectives", "nn/", "fsdp/", "_composable/", "tensor/")),
    *(f"torch/distributed/{name}" for name in ("algorithms/", "optim/", "pipelining/", "rpc/", "device_mesh.py")),
    # The Keeper's own connections between ranks.
    "elaunch/trainer/ranks/",
)
# Where the Keeper polls the GPU, asleep between two polls: for the gradients of a step, and so for their all-reduce.
_GPU_FILE = "elaunch/trainer/memory/device_copy.py"
# The lock of torch.utils.cpp_extension: a process that does not build sleeps until the file is removed.
_BATON_FILE = "torch/utils/file_baton.py"
# There Python joins all non-daemon threads, after the program and before exit functions.
_END = ("_shutdown", "threading.py")
_PROMPT_FILES = ("pdb.py", "bdb.py", "cmd.py", "code.py", "IPython/", "prompt_toolkit/")
# The first that was called counts.
_FILES = {
    Doing.LOADER: ("torch/utils/data/dataloader.py",),
    Doing.CHILD: ("subprocess.py", "multiprocessing/popen_"),
    Doing.LOCK: ("threading.py", "queue.py", "concurrent/futures/", "multiprocessing/queues", "multiprocessing/synch"),
    Doing.NETWORK: ("socket.py", "ssl.py", "http/client.py", "urllib3/", "asyncio/", "selectors.py"),
}
_CALLS = {
    **dict.fromkeys(("nanosleep", "clock_nanosleep"), Doing.SLEEP),
    **dict.fromkeys(("wait4", "waitid"), Doing.CHILD),
    "futex": Doing.LOCK,
    **dict.fromkeys(("recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "accept", "accept4"), Doing.NETWORK),
}
_POLL_CALLS = {"poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait"}
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


def doing(stack: Stack) -> Doing:
    if stack.held:
        return Doing.STOPPED if stack.is_stopped else Doing.TRACED
    return thread_doing(stack.main) if stack.main else Doing.UNKNOWN


def thread_doing(thread: ThreadStack) -> Doing:
    if _is_at_prompt(thread):
        return Doing.PROMPT
    if any(frame.file.replace("\\", "/").endswith(_GPU_FILE) for frame in thread.frames):
        return Doing.GPU
    if any((frame.function, frame.short_file) == _END for frame in thread.frames):
        return Doing.END
    by_call, by_frames = _by_call(thread), _by_frames(thread)
    # torch sleeps between two tries to reach MASTER_PORT.
    if by_call in (Doing.FILE, Doing.CHILD) or (by_call is Doing.SLEEP and by_frames is not Doing.RENDEZVOUS):
        return by_call
    if by_frames is not None:
        return by_frames
    if thread.is_active:
        return Doing.RUNS
    return by_call or Doing.OTHER


def waits_for_ranks(stack: Stack) -> bool | None:
    """Whether it waits for other ranks; None if that is unknown.

    A commit of the Keeper waits for the GPU. Torch's flight recorder shows whether the GPU is in a collective.
    """
    what = doing(stack)
    if what is Doing.UNKNOWN or (what is Doing.GPU and not stack.entered):
        return None
    return what.is_for_ranks or (what is Doing.GPU and stack.waits)


def doing_text(stack: Stack) -> str:
    """`doing` as text, with the name of the collective, or of the file."""
    what, main = doing(stack), stack.main
    if main and what is Doing.COLLECTIVE:
        return f"waits in {'the all-reduce of a backward pass' if _is_backward(main) else called_frame(main).function}"
    if main and what is Doing.SLEEP and any(frame.short_file == _BATON_FILE for frame in main.frames):
        return "waits for the lock of a torch extension's build"
    if main and what is Doing.FILE and main.target:
        return f"waits for {main.target}"
    return what.value


def does_where(stack: Stack) -> str:
    """Activity and location in the user's code, as the middle of a sentence."""
    main = stack.main
    if main is None or not main.frames:
        return f"{doing_text(stack)} ({stack.trouble or 'no Python frame'})"
    mine = main.innermost_user_frame or main.frames[0]
    if doing(stack) is Doing.END:
        return doing_text(stack)
    if doing(stack) is Doing.RUNS:
        return f"runs in {mine.text}"
    return f"{doing_text(stack)} ({mine.function}, {mine.short_file}:{mine.line}){_loader_text(stack)}"


def helpers_work(stack: Stack) -> bool:
    """Whether another thread of the process, or a child, may be working on what its main thread waits for.

    One that waits for a lock, a queue or other ranks is not. One whose system call is unknown may be.
    """
    threads = [thread for thread in stack.threads if not thread.is_main]
    threads += [thread for child in stack.children for thread in child.threads]
    stuck = (Doing.LOCK, Doing.COLLECTIVE, Doing.RENDEZVOUS)
    return any(thread.frames and thread_doing(thread) not in stuck for thread in threads)


def _loader_text(stack: Stack) -> str:
    """The data loader processes' activity, if the rank waits for them."""
    if doing(stack) is not Doing.LOADER:
        return ""
    mains = [child for child in stack.children if child.main and child.main.innermost_user_frame]
    if not mains:
        return ", none of whose processes is in the program's code"
    child = next((child for child in mains if doing(child) is not Doing.LOCK), mains[0])
    return f", whose process {child.pid} {doing_text(child)} in {location_text(child)}"


def _by_call(thread: ThreadStack) -> Doing | None:
    call, target = thread.syscall, thread.target
    if call in _CALLS:
        return _CALLS[call]
    if target.startswith("socket:"):
        return Doing.NETWORK
    if target.startswith("/") and not target.startswith("/dev/"):
        return Doing.FILE
    return Doing.NETWORK if call in _POLL_CALLS else None


def _by_frames(thread: ThreadStack) -> Doing | None:
    inner = thread.library_frames
    files = [frame.short_file for frame in inner]
    names = {frame.function for frame in inner}

    def calls(*prefixes: str) -> bool:
        return any(file.startswith(prefixes) for file in files)

    # A GPU's collective may busy-wait: then only its innermost frame shows what it does.
    if not thread.is_active or files[:1] == [COLLECTIVES_FILE]:
        if calls(_RENDEZVOUS_FILE) or (names & _RENDEZVOUS_FUNCTIONS and calls(*_COLLECTIVE_FILES)):
            return Doing.RENDEZVOUS
        if calls(*_COLLECTIVE_FILES) or _is_backward(thread):
            return Doing.COLLECTIVE
    if thread.is_active:
        return None
    return next((what for what, prefixes in _FILES.items() if calls(*prefixes)), None)


def _is_backward(thread: ThreadStack) -> bool:
    return any((frame.function, frame.short_file) == BACKWARD for frame in thread.frames[:1])


def _is_at_prompt(thread: ThreadStack) -> bool:
    if thread.is_active:
        return False
    return thread.target.startswith(_TERMINALS) or any(
        frame.short_file.startswith(_PROMPT_FILES) for frame in thread.library_frames
    )
