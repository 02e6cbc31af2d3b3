"""`elaunch -m elaunch.trainer [options]`: check everything that needs no torch, then train."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence

from elaunch.trainer.gpt.config import AgreedRefusal, ConfigError, RunDirectory, parse
from elaunch.trainer.gpt.corpus import Corpus
from elaunch.trainer.ranks import RankInfo

# Longer than a launcher needs to notice that rank 0 has ended, and to stop the others.
REFUSAL_GRACE_S = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the process's own), train, and return the exit code."""
    # Until there is a step to finish, Ctrl-C ends the process immediately and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    place = RankInfo.from_environ(os.environ)
    try:
        config = parse(sys.argv[1:] if argv is None else argv, place)
        if config is None:
            return 0
        corpus = Corpus.open(config)
        run = RunDirectory(config.out_path, config.checkpoints)
        if place.leads:
            run.claim(config, corpus.summary, again=place.generation > 0)
    except ConfigError as error:
        return _refuse(error, place)

    # The trainer does without numpy; only torch would warn that it is missing.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    # Imported late: a wrong option is reported within 0.1 s, while importing torch takes seconds.
    from elaunch.trainer import link
    from elaunch.trainer.train import train

    try:
        return train(config, corpus, place, run)
    except AgreedRefusal as error:
        link.refuse(str(error))
        return _refuse(error, place)
    except ConfigError as error:
        link.refuse(str(error))
        print(f"rank {place.rank}: {error}", file=sys.stderr, flush=True)
        return 2


def _refuse(error: ConfigError, place: RankInfo) -> int:
    """Only rank 0 prints the error. It must exit first: a launcher ends the other ranks once one has failed."""
    if place.leads:
        print(error, file=sys.stderr, flush=True)
    else:
        time.sleep(REFUSAL_GRACE_S)
    return 2


if __name__ == "__main__":
    sys.exit(main())
