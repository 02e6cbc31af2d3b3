"""Pauses a starting interpreter, which becomes the fork server here; in its forked children the start continues.

Python imports sitecustomize when all but the program itself is set up. This one is found only in a process that was
started with this folder first on PYTHONPATH: the fork server (`elaunch.agent.forkserver.client`), or a worker that is
a fresh interpreter, which does not pause.
"""

import os
import sys

_loaded = frozenset(sys.modules)
try:
    if os.environ.get("ELAUNCH_BOOT", "").startswith("fresh "):
        from elaunch.agent.forkserver import collectives, debugger, reports

        reports.prepare_fresh(_loaded, collectives.prepare)
        debugger.prepare()
    else:
        import gc

        # Off until all is imported: there is no garbage yet, and a collection takes time.
        gc.disable()
        # The numbers of a worker's link and crash file. ctypes opens a file that has to keep its number (libffi 3.5).
        for fd in (3, 4):
            if not os.path.exists(f"/proc/self/fd/{fd}"):  # noqa: PTH110
                os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

        from elaunch.agent.forkserver.server import main

        main(_loaded)
except KeyboardInterrupt:
    # Ctrl-C, while an IDE is waited for.
    os._exit(130)
except BaseException:
    # Python would print one line for this error, and then run the program in this process.
    import traceback

    traceback.print_exc()
    os._exit(1)

# In a forked worker. From here on Python itself starts the program.
if "sitecustomize" not in sys.modules:
    raise ImportError("there is no other sitecustomize", name="sitecustomize")
