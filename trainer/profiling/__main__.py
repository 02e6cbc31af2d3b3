"""`python -m elaunch.trainer.profiling DIR… -o FILE`: joins the ranks' traces."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from elaunch.trainer.profiling.traces import JOINED, write_joined


@click.command("elaunch.trainer.profiling")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path(JOINED), show_default=True)
def main(folders: tuple[Path, ...], output: Path) -> None:
    """Join the traces rank_N.json.gz in DIR… into one file for ui.perfetto.dev.

    Give the folders `profile` of all nodes.
    """
    files = [path for folder in folders for path in folder.glob("rank_[0-9]*.json.gz")]
    paths = {int(path.name.split("_")[1].split(".")[0]): path for path in files}
    if not paths:
        raise click.ClickException("there is no rank_N.json.gz in these folders; give those called profile")
    try:
        write_joined(output, ((rank, path.read_bytes()) for rank, path in sorted(paths.items())))
    except (OSError, EOFError, ValueError) as error:
        raise click.ClickException(f"the traces cannot be joined: {error}") from error
    click.echo(f"{output}: {len(paths)} ranks")


if __name__ == "__main__":
    sys.exit(main())
