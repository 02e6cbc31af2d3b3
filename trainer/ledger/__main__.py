"""`python -m elaunch.trainer.ledger FOLDER`: proves that each sample was trained on exactly once per epoch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from elaunch.trainer.ledger.audit import Verdict
from elaunch.trainer.ledger.ledger import audit_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdict in one sentence. 0 if each sample came exactly once, 1 if not, 2 for a wrong request."""
    try:
        found = _command.main(argv, prog_name="python -m elaunch.trainer.ledger", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except OSError as error:
        print(f"{error.filename} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    # Help has been printed.
    if not isinstance(found, Verdict):
        return 0
    print(found.text)
    return 0 if found.ok else 1


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--steps", type=click.IntRange(min=0), metavar="N", help="The run must have exactly N steps.")
def _command(folder: Path, steps: int | None) -> Verdict:
    """Prove from the ledger in FOLDER that every sample was trained on exactly once per epoch.

    Only steps that the next generation built on count. Of these no step may be missing, one rank must have computed
    each micro-batch, no sample may come twice in an epoch, and all samples must be those that the order asks for.
    """
    return audit_folder(folder, steps=steps)


if __name__ == "__main__":
    sys.exit(main())
