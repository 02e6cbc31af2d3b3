"""`python -m elaunch.trainer.ledger FOLDER`: proves that each sample was trained on exactly once per epoch."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from elaunch.trainer.ledger.ledger import audit_folder


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--steps", type=click.IntRange(min=0), metavar="N", help="The run must have exactly N steps.")
def main(folder: Path, steps: int | None) -> None:
    """Prove from the ledger in FOLDER that every sample was trained on exactly once per epoch.

    Only steps that the next generation built on count. Of these no step may be missing, one rank must have computed
    each micro-batch, no sample may come twice in an epoch, and all samples must be those of the order.
    """
    try:
        found = audit_folder(folder, steps=steps)
    except OSError as error:
        raise click.UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    click.echo(found.text)
    # 2 is for usage errors.
    sys.exit(0 if found.ok else 1)


if __name__ == "__main__":
    main(prog_name="python -m elaunch.trainer.ledger")
