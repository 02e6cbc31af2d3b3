"""`python -m elaunch.trainer.profiling DIR… -o FILE`: joins the ranks' traces that several nodes have left."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from elaunch.trainer.files import read_regular
from elaunch.trainer.profiling.merging import RankTrace, write_merged
from elaunch.trainer.profiling.places import MERGED, RECORD
from elaunch.trainer.profiling.traces import parsed, unpacked

_FILE = re.compile(r"rank_([0-9]{1,9})\.json\.gz")
_RECORD_BYTES_MAX = 64 << 20


@click.command("elaunch.trainer.profiling")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path(MERGED), show_default=True)
def main(folders: tuple[Path, ...], output: Path) -> None:
    """Join the traces rank_N.json.gz in DIR… into one file for ui.perfetto.dev.

    Give the folders `profile` of all nodes. One of them has the profile.json of rank 0, which says how far the hosts'
    clocks are apart.
    """
    paths = {int(found[1]): path for folder in folders for path, found in _files(folder)}
    if not paths:
        raise click.ClickException("there is no rank_N.json.gz in these folders; give those called profile")
    try:
        write_merged(output, _traces(paths, _clocks(folders)))
    except (OSError, EOFError, ValueError) as error:
        raise click.ClickException(f"the traces cannot be joined: {error}") from error
    click.echo(f"{output}: {len(paths)} ranks")


def _files(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(folder.iterdir()):
        if found := _FILE.fullmatch(path.name):
            yield path, found


def _clocks(folders: Sequence[Path]) -> Mapping[int, Mapping[str, Any]]:
    """What the record says of each rank; nothing without a record."""
    for path in (folder / RECORD for folder in folders):
        if path.is_file():
            ranks = json.loads(read_regular(path, _RECORD_BYTES_MAX)).get("ranks", [])
            return {int(each["rank"]): each for each in ranks}
    click.echo(f"there is no {RECORD} in these folders: clocks of hosts are taken as they are", err=True)
    return {}


def _traces(paths: Mapping[int, Path], clocks: Mapping[int, Mapping[str, Any]]) -> Iterator[RankTrace]:
    for rank, path in sorted(paths.items()):
        known = clocks.get(rank, {})
        ahead_ns = round(float(known.get("clock_ahead_s", 0.0)) * 1e9)
        yield RankTrace(rank, str(known.get("host", "")), parsed(unpacked(path.read_bytes())), ahead_ns)


if __name__ == "__main__":
    sys.exit(main())
