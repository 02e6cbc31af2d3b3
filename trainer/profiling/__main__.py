"""`python -m elaunch.trainer.profiling DIR… -o FILE`: joins the ranks' traces of several nodes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from elaunch.trainer.profiling.traces import JOINED, write_joined

_FILE = re.compile(r"rank_([0-9]{1,9})\.json\.gz")


@click.command("elaunch.trainer.profiling")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path(JOINED), show_default=True)
def main(folders: tuple[Path, ...], output: Path) -> None:
    """Join the traces rank_N.json.gz in DIR… into one file for ui.perfetto.dev.

    Give the folders `profile` of all nodes.
    """
    files = [(_FILE.fullmatch(path.name), path) for folder in folders for path in folder.iterdir()]
    paths = {int(found[1]): path for found, path in files if found}
    if not paths:
        raise click.ClickException("there is no rank_N.json.gz in these folders; give those called profile")
    try:
        write_joined(output, ((rank, path.read_bytes()) for rank, path in sorted(paths.items())))
    except (OSError, EOFError, ValueError) as error:
        raise click.ClickException(f"the traces cannot be joined: {error}") from error
    click.echo(f"{output}: {len(paths)} ranks")


if __name__ == "__main__":
    sys.exit(main())
