"""The options of a training run: the command line, what is refused, what makes two runs the same run."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import click

from elaunch.trainer.checkpoint.storage import storage_at
from elaunch.trainer.data.order import fitting_micro_batch
from elaunch.trainer.ranks.place import RankInfo

Plain: TypeAlias = int | float | bool | str | None


class ConfigError(Exception):
    """The user's request cannot be done as asked: one sentence with the values and the way out, exit code 2."""


@dataclass(frozen=True)
class TrainConfig:
    """What a run is made of.

    `global_batch` counts windows of `context` bytes per optimizer step, over all workers, and `micro_batch` those of
    one forward pass. `learning_rate` is the peak. `snapshot_every` is None where the measured cost decides, `out` and
    `data` where the user left the choice to us (see `out_path` and `Corpus.open`). `checkpoints` is a folder or a URL,
    None the run directory's own.
    """

    steps: int = 400
    seed: int = 0
    global_batch: int = 24
    micro_batch: int = 3
    checkpoint_every: int = 50
    snapshot_every: int | None = None
    out: Path | None = None
    data: Path | None = None
    checkpoints: str | None = None
    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 64
    learning_rate: float = 3e-3
    dropout: float = 0.0
    bf16: bool = False
    ledger: bool = False

    @property
    def identity(self) -> dict[str, Plain]:
        """The options that change what is computed. A run directory holds one such set; the others may vary."""
        free = ("out", "checkpoints", "checkpoint_every", "snapshot_every", "ledger")
        plain = {**asdict(self), "data": None if self.data is None else str(self.data.absolute())}
        return {key: value for key, value in plain.items() if key not in free}

    @property
    def out_path(self) -> Path:
        """`--out`, or a directory named after the options, so that the same command finds its own run again."""
        if self.out is not None:
            return self.out
        digest = hashlib.sha256(repr(sorted(self.identity.items())).encode()).hexdigest()
        return Path("runs") / f"gpt-{self.layers}x{self.width}-{digest[:8]}"

    def check(self, world_size: int) -> None:
        """Raise ConfigError where the options contradict each other or the number of workers."""
        if self.width % self.heads:
            raise ConfigError(
                f"--width ({self.width}) is not divisible by --heads ({self.heads}); "
                f"use --width {_next_multiple(self.width, self.heads)} or another number of heads"
            )
        self._check_batch(world_size)
        if self.checkpoints is not None:
            try:
                storage_at(self.checkpoints)
            except ValueError as error:
                raise ConfigError(f"--checkpoints: {error}") from error

    def _check_batch(self, world_size: int) -> None:
        batch, micro = self.global_batch, self.micro_batch
        if batch % micro:
            raise ConfigError(
                f"--global-batch ({batch}) is not divisible by --micro-batch ({micro}); use --micro-batch "
                f"{fitting_micro_batch(batch, micro)} or --global-batch {_next_multiple(batch, micro)}"
            )
        many = batch // micro
        if many < world_size:
            fitting = (
                f"--micro-batch {fitting_micro_batch(batch, batch // world_size)}"
                if batch >= world_size
                else f"--global-batch {micro * world_size}"
            )
            raise ConfigError(
                f"--global-batch {batch} with --micro-batch {micro} makes {many} micro-batch{'es' * (many > 1)}, too "
                f"few for {world_size} workers; use {fitting} or at most {many} worker{'s' * (many > 1)}"
            )


def parse(argv: Sequence[str], place: RankInfo) -> TrainConfig | None:
    """The configuration that the command line asks for; None where it asked for help, which rank 0 has then printed.

    Raises ConfigError with one sentence for anything that cannot be meant.
    """
    try:
        with _printing(place.leads):
            config = _command.main(list(argv), prog_name="elaunch -m elaunch.trainer", standalone_mode=False)
    except click.ClickException as error:
        sentence = error.format_message().rstrip(".")
        raise ConfigError(f"{sentence}; see elaunch -m elaunch.trainer --help") from error
    if not isinstance(config, TrainConfig):
        return None
    config.check(place.world_size)
    return config


def _printing(leads: bool) -> contextlib.AbstractContextManager[object]:
    """Drop what click prints on all ranks but 0: one help text is enough."""
    return contextlib.nullcontext() if leads else contextlib.redirect_stdout(io.StringIO())


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _micro_batch_for(global_batch: int) -> int:
    """The micro-batch if only the global batch was given.

    It does not depend on the number of workers, since a run must stay the same run with fewer or more of them.
    """
    return fitting_micro_batch(global_batch, max(1, min(_DEFAULT.micro_batch, global_batch // _MICRO_BATCHES)))


_DEFAULT = TrainConfig()
# Micro-batches of a step by default, and so the largest number of workers that can share a step.
_MICRO_BATCHES = _DEFAULT.global_batch // _DEFAULT.micro_batch
_COUNT = click.IntRange(min=1)


@click.command(context_settings={"max_content_width": 110, "show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--steps", type=_COUNT, default=_DEFAULT.steps, metavar="N", help="Optimizer steps in all.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=_DEFAULT.seed,
    metavar="N",
    help="Start of all randomness: weights, data order, dropout.",
)
@click.option(
    "--global-batch",
    type=_COUNT,
    default=_DEFAULT.global_batch,
    metavar="WINDOWS",
    help="Windows of text per step over all workers, however many there are.",
)
@click.option(
    "--micro-batch",
    type=_COUNT,
    metavar="WINDOWS",
    help="Windows per forward pass; a step has global batch / micro-batch of them, at least one per worker.  "
    f"[default: the largest up to {_DEFAULT.micro_batch} that makes at least {_MICRO_BATCHES} of them, else 1]",
)
@click.option(
    "--checkpoint-every",
    type=_COUNT,
    default=_DEFAULT.checkpoint_every,
    metavar="STEPS",
    help="Steps between checkpoints; there is always one at the end.",
)
@click.option(
    "--snapshot-every",
    type=_COUNT,
    metavar="STEPS",
    help="Steps between copies of the state in memory.  [default: as often as it costs less than 1 % of the time]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run directory; the same command with the same DIR goes on where it was. On several nodes: a "
    "shared one.  [default: runs/<name made from the options>]",
)
@click.option(
    "--checkpoints",
    metavar="DIR|URL",
    help="Where the checkpoints go: a folder, or a URL that fsspec reaches, as s3://bucket/run.  "
    "[default: checkpoints in --out]",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Train on the files below DIR, of any kind.  [default: Python's own library, *.py]",
)
@click.option("--layers", type=_COUNT, default=_DEFAULT.layers, metavar="N", help="Transformer blocks.")
@click.option("--heads", type=_COUNT, default=_DEFAULT.heads, metavar="N", help="Attention heads; divide width.")
@click.option("--width", type=_COUNT, default=_DEFAULT.width, metavar="N", help="Size of a token's vector.")
@click.option(
    "--context",
    type=_COUNT,
    default=_DEFAULT.context,
    metavar="BYTES",
    help="Bytes in a window: what the model sees at once.",
)
@click.option(
    "--lr",
    "learning_rate",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULT.learning_rate,
    metavar="RATE",
    help="Peak learning rate: warms up, then falls as a cosine to a tenth.",
)
@click.option(
    "--dropout",
    type=click.FloatRange(0, 1, max_open=True),
    default=_DEFAULT.dropout,
    metavar="SHARE",
    help="Share of activations dropped while training.",
)
@click.option("--bf16", is_flag=True, help="Compute in bfloat16 (autocast); weights stay float32.")
@click.option(
    "--ledger", is_flag=True, help="Keep in DIR/ledger which worker trained on what, and prove that nothing came twice."
)
def _command(global_batch: int, micro_batch: int | None, **options: object) -> TrainConfig:
    """Train a small GPT on bytes of text: the bundled example of a job that survives its workers.

    Start it with as many workers as you like:

    \b
      elaunch --nproc-per-node 2 -m elaunch.trainer --out runs/first

    No step is lost while a worker lives, and where all die at once only those since the last copy in memory; the result
    is, bit for bit on CPUs, the one without the failure. DIR then holds config.yaml, metrics.jsonl, checkpoints/ and
    result.json.
    """
    micro_batch = micro_batch or _micro_batch_for(global_batch)
    return TrainConfig(global_batch=global_batch, micro_batch=micro_batch, **options)  # type: ignore[arg-type]
