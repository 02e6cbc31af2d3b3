"""The programs: which library each is of, what it needs, and what it shows. One row is one program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Program:
    """A program of `programs/`, and how it is launched.

    `imports` is a module that must be there, or the program is skipped. `workers` is the number that the launcher
    starts, `ranks` the number that say their steps. `leaves` are patterns of what the library itself leaves in the
    temporary folder, also without a launcher; wandb does so if its own processes are killed.
    `first_step_s` is the time that it may take on a busy machine.
    """

    name: str
    library: str
    shows: str
    imports: str = "torch"
    arguments: tuple[str, ...] = ()
    # The file's name without its end, if it has several programs.
    script: str = ""
    workers: int = 2
    ranks: int = 2
    leaves: tuple[str, ...] = ()
    # Imports of a large library, several times.
    first_step_s: float = 180.0

    @property
    def words(self) -> tuple[str, ...]:
        """The end of the launcher's command line. Run it in a copy of `programs/`."""
        if self.arguments[:1] == ("-m",):
            return self.arguments
        return (self.file, *self.arguments)

    @property
    def file(self) -> str:
        return (
            f"{self.arguments[1].replace('.', '/')}.py"
            if self.arguments[:1] == ("-m",)
            else f"{self.script or self.name}.py"
        )


# torch.multiprocessing's file of an error, which a parent that is killed does not read.
_SPAWN = ("pytorch-errorfile-*",)
# Python ends the processes of a DataLoader that are left at its own end, and not their folders.
_LOADERS = ("pymp-*",)
# Of what is compiled in C++ at the first step, anew in each test's cache.
_COMPILED_S = 900.0
_TORCH = "torch"


def _form(name: str, shows: str, workers: int = 2, ranks: int = 2) -> Program:
    return Program(name, _TORCH, shows, arguments=(name,), script="forms", workers=workers, ranks=ranks)


PROGRAMS = (
    _form("ddp", "DistributedDataParallel"),
    Program("dataloader", _TORCH, "a DataLoader's processes, forked and kept", leaves=_LOADERS),
    Program("dataloader_forkserver", _TORCH, "a DataLoader's processes from Python's fork server", leaves=_LOADERS),
    _form("fsdp", "FullyShardedDataParallel"),
    _form("fsdp2", "fully_shard (FSDP2)"),
    _form("tensor_parallel", "parallelize_module"),
    _form("mesh_2d", "a mesh of two dimensions: FSDP2 and tensor parallelism", workers=4, ranks=4),
    Program("pipelining", _TORCH, "PipelineStage and a 1F1B schedule"),
    Program("dcp", _TORCH, "distributed checkpoints, saved beside the training"),
    _form("join", "Join: uneven inputs"),
    _form("zero", "ZeroRedundancyOptimizer"),
    Program("compile", _TORCH, "torch.compile", first_step_s=_COMPILED_S),
    Program("rpc", _TORCH, "torch.distributed.rpc"),
    _form("comm_hooks", "a communication hook: PowerSGD"),
    _form("local_sgd", "post-local SGD"),
    Program("amp", _TORCH, "autocast, no_sync, activation checkpoints, averaged weights"),
    Program("megatron_groups", _TORCH, "tensor and data groups as Megatron makes them", workers=4, ranks=4),
    Program("objects", _TORCH, "collectives of objects, monitored_barrier, the store"),
    Program("elastic_launch", _TORCH, "elastic_launch inside a worker", leaves=("torchelastic_*",)),
    Program(
        "own_spawn",
        _TORCH,
        "a program that spawns its own ranks",
        workers=1,
        leaves=_SPAWN,
    ),
    Program("own_processes", _TORCH, "a launcher of one's own, by subprocess", workers=1),
    Program("record", _TORCH, "@record, argparse, logging, torch.profiler", arguments=("--lr", "0.1")),
    Program("module", _TORCH, "a package, started by -m", arguments=("-m", "package.train")),
    Program("without_torch", "none", "a program that never imports torch"),
    Program("bars", "rich, tqdm", "progress bars and a table", imports="rich"),
    Program("with_tensorboard", "TensorBoard", "SummaryWriter on rank 0", imports="tensorboard"),
    Program("with_wandb", "wandb", "an offline run on rank 0", imports="wandb", leaves=("*wandb*",)),
    Program("with_hydra", "Hydra", "hydra.main, instantiate, overrides", "hydra", ("optimizer.lr=0.01",)),
    Program(
        "with_lightning",
        "Lightning",
        "Trainer with the DDP strategy, a loader's process",
        imports="lightning",
        leaves=_LOADERS,
    ),
    Program("with_lightning_cli", "LightningCLI", "a command line, ModelCheckpoint", "jsonargparse", ("fit",)),
    Program("with_fabric", "Fabric", "Fabric's set-up, bf16, clipping", imports="lightning"),
    Program("with_accelerate", "Accelerate", "Accelerator, accumulate, gather", imports="accelerate"),
    Program("with_transformers", "transformers", "Trainer with checkpoints", imports="transformers"),
    Program("with_peft", "PEFT", "LoRA adapters", imports="peft"),
    Program("with_trl", "TRL", "SFTTrainer", imports="trl", leaves=("*wandb*",)),
    Program("with_ignite", "ignite", "idist.Parallel, Engine, a metric", imports="ignite"),
    Program("with_torchmetrics", "torchmetrics", "a metric over all ranks", imports="torchmetrics"),
    Program("with_datasets", "datasets", "map, split by node, a loader's process", "datasets", leaves=_LOADERS),
    Program("with_torchdata", "torchdata", "StatefulDataLoader with processes", imports="torchdata", leaves=_LOADERS),
    Program(
        "with_torchao",
        "torchao",
        "an optimizer of 8 bits",
        imports="torchao",
        first_step_s=_COMPILED_S,
    ),
    Program("with_fairscale", "fairscale", "OSS and ShardedDataParallel", imports="fairscale"),
    Program(
        "with_deepspeed",
        "DeepSpeed",
        "an engine with ZeRO stage 1",
        imports="deepspeed",
        # It compiles an extension in C++ for its collectives on CPUs.
        first_step_s=_COMPILED_S,
    ),
)


def named(names: str) -> list[Program]:
    """The programs whose names are in a list with commas. Raises ValueError with those that are not there."""
    wanted = names.split(",")
    if unknown := sorted({*wanted} - {each.name for each in PROGRAMS}):
        raise ValueError(f"there is no program {', '.join(unknown)}")
    return [each for each in PROGRAMS if each.name in wanted]
