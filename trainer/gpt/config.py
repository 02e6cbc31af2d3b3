"""The options of a training run: the command line, what is refused, what makes two runs the same; its directory."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import click
import yaml

from elaunch.trainer.checkpoint.storage import NOTE_BYTES_MAX, storage_at
from elaunch.trainer.data.order import Order, fitting_micro_batch
from elaunch.trainer.files import read_regular, sweep, write_durably
from elaunch.trainer.parallel.plan import ConfigError as ConfigError
from elaunch.trainer.parallel.plan import ParallelPlan, Shape, Sizes, fit, require_fitting
from elaunch.trainer.parallel.plan import parse as parse_plan
from elaunch.trainer.profiling.traces import last_step_needed, parse_steps
from elaunch.trainer.ranks import RankInfo

Plain: TypeAlias = int | float | bool | str | None

_COUNT = click.IntRange(min=1)
_SEED = click.IntRange(0, 2**63 - 1)
_POSITIVE = click.FloatRange(min=0, min_open=True)
_SHARE = click.FloatRange(0, 1, max_open=True)
_PATH = click.Path(path_type=Path)
_MICRO_BATCH = """Windows per forward pass; a step has global batch / micro-batch of them, at least one per worker.
  [default: the largest up to 3 that makes at least 8 of them, else 1]"""
_LOSE_AT_MOST = """Complete steps that a failure may take back while the nodes' memory lives; 0 copies each step.
  [default: as many copies as cost less than 1 % of the time]"""
_EVAL_EVERY = """Compute the loss on held-out text before step 1, and again every STEPS steps.
  [default: only at the end]"""
_OUT = """Run directory; the same command with the same DIR continues where it was. On several nodes: a shared one.
  [default: runs/<name made from the options>]"""
_CHECKPOINTS = """Where the checkpoints go: a folder, or a URL that fsspec reaches, as s3://bucket/run.
  [default: checkpoints in --out]"""
_DATA = "Train on the files below DIR, of any kind.  [default: Python's own library, *.py]"
_LEARNING_RATE = "Peak learning rate: warms up, then falls as a cosine to a tenth."
_PARALLEL = """How the workers share the training: ddp, zero1, zero2, fsdp2 or hsdp, or their number along each axis, as
  dp=2,tp=2 of dp, fsdp, tp and pp (with schedule=gpipe|1f1b|interleaved); auto: measure at the start which one fits
  into the memory and is fastest."""
_COMM_HOOK = "How DDP compresses gradients.  [default: not at all]"
_BUCKET_MB = "Size of DDP's buckets in MiB.  [default: 25, and the first 1]"
_PROFILE = "Profile these steps on all ranks: 10-12, or 3 for three steps once the run is warm."
_LEDGER = "Keep in DIR/ledger which worker trained on what, and prove that no sample was repeated."
_TUNE_COMM = "Measure at the first start which size of DDP's buckets is fastest on this network, and remember it."
# They may differ between two starts of one run.
_FREE = {"out", "checkpoints", "checkpoint_every", "lose_at_most", "eval_every", "compile"}
# The size of buckets changes at most the order of float sums, as another number of workers does.
_FREE |= {"ledger", "profile", "tune_comm", "bucket_mb"}

_COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "clang++")

# Incremented when earlier weights would mean something else (2: the rows of attention are ordered by head).
_LAYOUT = 2


class AgreedRefusal(ConfigError):
    """A refusal that all ranks raise at the same place, with the same sentence."""


def _option(default: Any, kind: Any, metavar: str | None, text: str, **more: Any) -> Any:
    """A field of TrainConfig and its option; `given`: click's default, `name`: the option's name, if they differ."""
    return field(default=default, metadata={"type": kind, "metavar": metavar, "help": text, **more})


@dataclass(frozen=True)
class TrainConfig:
    """The options of a run.

    `lose_at_most` is None where the measured cost decides, `out` and `data` where the user left the choice to us (see
    `out_path` and `Corpus.open`). `checkpoints` is None for the run directory's own folder.
    """

    steps: int = _option(400, _COUNT, "N", "Optimizer steps in all.")
    seed: int = _option(0, _SEED, "N", "Start of all randomness: weights, data order, dropout.")
    global_batch: int = _option(24, _COUNT, "WINDOWS", "Windows of text per step, however many workers there are.")
    micro_batch: int = _option(3, _COUNT, "WINDOWS", _MICRO_BATCH, given=None)
    checkpoint_every: int = _option(50, _COUNT, "STEPS", "Steps between checkpoints; there is always one at the end.")
    lose_at_most: int | None = _option(None, click.IntRange(min=0), "STEPS", _LOSE_AT_MOST)
    eval_every: int | None = _option(None, _COUNT, "STEPS", _EVAL_EVERY)
    out: Path | None = _option(None, _PATH, "DIR", _OUT)  # noqa: RUF009
    checkpoints: str | None = _option(None, None, "DIR|URL", _CHECKPOINTS)
    data: Path | None = _option(None, _PATH, "DIR", _DATA)  # noqa: RUF009
    layers: int = _option(4, _COUNT, "N", "Transformer blocks.")
    heads: int = _option(4, _COUNT, "N", "Attention heads; divide width.")
    width: int = _option(128, _COUNT, "N", "Size of a token's vector.")
    context: int = _option(64, _COUNT, "BYTES", "Bytes in a window: what the model sees at once.")
    learning_rate: float = _option(3e-3, _POSITIVE, "RATE", _LEARNING_RATE, name="--lr")
    dropout: float = _option(0.0, _SHARE, "SHARE", "Share of activations dropped while training.")
    bf16: bool = _option(False, bool, None, "Compute in bfloat16 (autocast); weights stay float32.")
    parallel: str = _option("ddp", None, "PLAN", _PARALLEL)
    compile: bool = _option(False, bool, None, "Compile the network with torch.compile.")
    ledger: bool = _option(False, bool, None, _LEDGER)
    profile: str | None = _option(None, None, "STEPS", _PROFILE)
    comm_hook: str | None = _option(None, click.Choice(["fp16", "bf16", "powersgd"]), None, _COMM_HOOK)
    bucket_mb: float | None = _option(None, _POSITIVE, "MIB", _BUCKET_MB)
    tune_comm: bool = _option(False, bool, None, _TUNE_COMM)

    @property
    def identity(self) -> dict[str, Plain]:
        """The options that change what is computed. A run directory holds one such set; the others may vary."""
        plain = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in _FREE}
        data = None if self.data is None else str(self.data.absolute())
        return {**plain, "data": data, "parallel": self.plan.identity}

    @property
    def plan(self) -> ParallelPlan:
        """The plan that `--parallel` requests. Raises ConfigError."""
        return parse_plan(self.parallel)

    @property
    def shape(self) -> Shape:
        """What a plan divides."""
        return Shape(self.layers, self.heads, self.width, self.context, self.global_batch, self.micro_batch)

    def sizes(self, place: RankInfo) -> Sizes:
        """How many workers each axis of the plan gets. Raises ConfigError."""
        return fit(self.plan, place.world_size, again=place.generation > 0)

    @property
    def out_path(self) -> Path:
        """`--out`, or a directory named after the options, so that the same command finds its own run again."""
        if self.out is not None:
            return self.out
        digest = hashlib.sha256(repr(sorted(self.identity.items())).encode()).hexdigest()
        return Path("runs") / f"gpt-{self.layers}x{self.width}-{digest[:8]}"

    @property
    def ddp_options(self) -> list[str]:
        """The options that are given and that DDP alone has."""
        names = ("comm_hook", "bucket_mb", "tune_comm")
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]

    def check(self, place: RankInfo) -> None:
        """Raise ConfigError where the options contradict each other or the number of workers."""
        if self.width % self.heads:
            raise ConfigError(
                f"--width ({self.width}) is not divisible by --heads ({self.heads}); "
                f"use --width {-(-self.width // self.heads) * self.heads} or another number of heads"
            )
        self._check_profile()
        self._check_batch()
        if not self.plan.is_auto:
            require_fitting(self.plan, self.sizes(place), self.shape)
            if not self.plan.has_ddp and (options := self.ddp_options):
                raise ConfigError(f"{options[0]} is DDP's, and --parallel {self.parallel} has no DDP; leave it out")
        sized = {
            "--comm-hook powersgd": self.comm_hook == "powersgd",
            "--bucket-mb": self.bucket_mb is not None,
            "--tune-comm": self.tune_comm,
        }
        if len(given := [option for option, is_given in sized.items() if is_given]) > 1:
            raise ConfigError(f"{given[0]} decides the size of DDP's buckets, and so does {given[1]}; leave one out")
        if self.checkpoints is not None:
            try:
                storage_at(self.checkpoints)
            except ValueError as error:
                raise ConfigError(f"--checkpoints: {error}") from error

    def check_machine(self) -> None:
        """Raise ConfigError where this machine lacks what an option needs."""
        if self.compile and not (os.environ.get("CXX") or any(map(shutil.which, _COMPILERS))):
            raise ConfigError("--compile needs a C++ compiler, and none is on the PATH; install g++ or leave it out")
        if self.comm_hook == "powersgd" and importlib.util.find_spec("numpy") is None:
            raise ConfigError("--comm-hook powersgd is torch's, which needs numpy; `pip install numpy` or leave it out")

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        try:
            needed = last_step_needed(parse_steps(self.profile))
        except ValueError as error:
            raise ConfigError(f"--profile: {error}") from error
        if needed > self.steps:
            raise ConfigError(
                f"--profile {self.profile} ends with step {needed}, and --steps is {self.steps}; "
                f"give fewer or earlier steps, or --steps {needed}"
            )

    def _check_batch(self) -> None:
        try:
            Order(1, global_batch=self.global_batch, micro_batch=self.micro_batch)
        except ValueError as error:
            raise ConfigError(f"--global-batch, --micro-batch: {error}") from error


def parse(argv: Sequence[str], place: RankInfo) -> TrainConfig | None:
    """The configuration that the command line requests; None where it is `--help`, which rank 0 has then printed.

    Raises ConfigError with one sentence for invalid options.
    """
    # One help text is enough.
    printing = contextlib.nullcontext() if place.leads else contextlib.redirect_stdout(io.StringIO())
    try:
        with printing:
            config = _command.main(list(argv), prog_name="elaunch -m elaunch.trainer", standalone_mode=False)
    except click.ClickException as error:
        sentence = error.format_message().rstrip(".")
        raise ConfigError(f"{sentence}; see elaunch -m elaunch.trainer --help") from error
    if not isinstance(config, TrainConfig):
        return None
    config.check(place)
    if place.leads:
        config.check_machine()
    return config


def _micro_batch_for(global_batch: int) -> int:
    """The micro-batch if only the global batch was given.

    It does not depend on the number of workers, since a run must stay the same run with fewer or more of them.
    """
    usual = TrainConfig()
    # The micro-batches of a step by default, and so the largest number of workers that can share a step.
    many = usual.global_batch // usual.micro_batch
    return fitting_micro_batch(global_batch, max(1, min(usual.micro_batch, global_batch // many)))


def _made(global_batch: int, micro_batch: int | None, **options: Any) -> TrainConfig:
    return TrainConfig(global_batch=global_batch, micro_batch=micro_batch or _micro_batch_for(global_batch), **options)


_command = click.Command(
    "elaunch.trainer",
    callback=_made,
    context_settings={"max_content_width": 110, "show_default": True, "help_option_names": ["-h", "--help"]},
    params=[
        click.Option(
            [option.metadata.get("name", f"--{option.name.replace('_', '-')}"), option.name],
            type=option.metadata["type"],
            is_flag=option.metadata["type"] is bool,
            default=option.metadata.get("given", option.default),
            metavar=option.metadata["metavar"],
            help=option.metadata["help"],
        )
        for option in fields(TrainConfig)
    ],
    help="""Train a small GPT on bytes of text: the bundled example of a job that survives its workers.

    Start it with as many workers as you like:

    \b
      elaunch --nproc-per-node 2 -m elaunch.trainer --out runs/first

    With ddp no step is lost while a worker lives, and where all die together only those since the last copy in memory;
    the result is, bit for bit on CPUs, the one without the failure. DIR then holds config.yaml, metrics.jsonl,
    checkpoints/ and result.json.
    """,
)


class RunDirectory:
    """The files of one run.

    Rank 0 alone writes `config.yaml`, `metrics.jsonl`, with `--parallel auto` `plan.json`, and `result.json` once the
    run is complete. All ranks write `ledger/` and `profile/`, and all that have a part of the state `checkpoints/`.
    Checkpoints that are elsewhere have a `config.yaml` of their own beside them.
    """

    def __init__(self, path: Path, checkpoints: str | None = None) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints: Path | str = path / "checkpoints" if checkpoints is None else checkpoints
        self.ledger = path / "ledger"
        self.profile = path / "profile"
        self.plan = path / "plan.json"
        self._result = path / "result.json"

    def claim(self, config: TrainConfig, corpus: str, *, again: bool = False) -> None:
        """Make the directory this run's. Raises ConfigError if it holds another run or cannot be written.

        `corpus` is the text's summary. `again`: this is a restart, which must not fail because checkpoints elsewhere
        cannot be reached now.
        """
        wanted: dict[str, Plain] = {**config.identity, "corpus": corpus, "layout": _LAYOUT}
        holder = "--out" if config.checkpoints is None else "--checkpoints"
        content = yaml.safe_dump(wanted, sort_keys=False).encode()
        for option, place in (("--out", self.path), ("--checkpoints", config.checkpoints)):
            if place is None or (again and option == "--checkpoints"):
                continue
            storage = storage_at(place)
            try:
                if option == "--out":
                    self.path.mkdir(parents=True, exist_ok=True)
                    for folder in (self.path, self.path / "checkpoints"):
                        sweep(folder)
                noted = storage.read_note("config.yaml")
                is_theirs = noted is None and option == holder and self.has_checkpoints()
                require_ours(option, str(storage), noted, wanted, has_checkpoints=is_theirs)
                # A restart writes nothing here: it must not fail if the disk is full by then. What is written first
                # shows that the place can be written.
                if noted is None:
                    storage.files.write("config.yaml", content)
            except OSError as error:
                raise ConfigError(
                    f"{option} {storage} cannot be used ({error.strerror or error}); give a place that is there and "
                    "can be written"
                ) from error

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached its last step and written its result."""
        return self._result.exists()

    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint from which the run continues. Raises OSError."""
        return bool(storage_at(self.checkpoints).found())

    def kept_plan(self) -> bytes | None:
        """What `keep_plan` has kept, in the directory or beside the checkpoints; None if nothing. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return read_regular(self.plan, NOTE_BYTES_MAX)
        return storage_at(self.checkpoints).read_note(self.plan.name)

    def keep_plan(self, content: bytes) -> None:
        """Keep the plan that the run has chosen, also beside checkpoints that are elsewhere. Raises OSError."""
        write_durably(self.plan, content)
        if self.checkpoints != self.path / "checkpoints":
            storage_at(self.checkpoints).files.write(self.plan.name, content)

    def write_result(self, result: dict[str, Plain]) -> None:
        """Write `result.json`, whole or not at all."""
        write_durably(self._result, json.dumps(result, indent=2).encode() + b"\n")


def require_ours(
    option: str, place: str, text: bytes | None, wanted: dict[str, Plain], *, has_checkpoints: bool
) -> None:
    """Raise ConfigError if that place, with this config.yaml, holds another run. A new place has no config.yaml."""
    if text is None:
        if has_checkpoints:
            raise ConfigError(f"{option} {place} holds checkpoints but no config.yaml; give another {option}")
        return
    try:
        held = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{place}/config.yaml cannot be read as YAML; fix it or give another {option}") from error
    if not isinstance(held, dict):
        raise ConfigError(f"{place}/config.yaml holds no configuration; give another {option}")
    # The text may have another path (another mount), but it must be the same text; `corpus` is its digest.
    differing = [key for key in wanted if key != "data" and held.get(key) != wanted[key]]
    if differing:
        then = ", ".join(f"{key} {held.get(key)}" for key in differing)
        now = ", ".join(f"{key} {wanted[key]}" for key in differing)
        raise ConfigError(
            f"{option} {place} holds a run with {then}, not {now}; give another {option}, or the options of that run"
        )
