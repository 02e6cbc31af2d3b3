"""The programs: which library each is of, and what it needs. One row is one program; its docstring says more."""

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
# Of what is compiled in C++ at the first step, again in each test's cache.
_COMPILED_S = 900.0
_TORCH = "torch"


def _form(name: str, workers: int = 2, ranks: int = 2) -> Program:
    return Program(name, _TORCH, arguments=(name,), script="forms", workers=workers, ranks=ranks)


PROGRAMS = (
    _form("ddp"),
    Program("dataloader", _TORCH, leaves=_LOADERS),
    Program("dataloader_forkserver", _TORCH, leaves=_LOADERS),
    _form("fsdp"),
    _form("fsdp2"),
    _form("tensor_parallel"),
    _form("mesh_2d", workers=4, ranks=4),
    Program("pipelining", _TORCH),
    Program("dcp", _TORCH),
    _form("join"),
    _form("zero"),
    Program("compile", _TORCH, first_step_s=_COMPILED_S),
    Program("rpc", _TORCH),
    _form("comm_hooks"),
    _form("local_sgd"),
    Program("amp", _TORCH),
    Program("megatron_groups", _TORCH, workers=4, ranks=4),
    Program("objects", _TORCH),
    Program("elastic_launch", _TORCH, leaves=("torchelastic_*",)),
    Program("own_spawn", _TORCH, workers=1, leaves=_SPAWN),
    Program("own_processes", _TORCH, workers=1),
    Program("record", _TORCH, arguments=("--lr", "0.1")),
    Program("module", _TORCH, arguments=("-m", "package.train")),
    Program("without_torch", "none"),
    Program("bars", "rich, tqdm", imports="rich"),
    Program("with_tensorboard", "TensorBoard", imports="tensorboard"),
    Program("with_wandb", "wandb", imports="wandb", leaves=("*wandb*",)),
    Program("with_hydra", "Hydra", "hydra", ("optimizer.lr=0.01",)),
    Program("with_lightning", "Lightning", imports="lightning", leaves=_LOADERS),
    Program("with_lightning_cli", "LightningCLI", "jsonargparse", ("fit",)),
    Program("with_fabric", "Fabric", imports="lightning"),
    Program("with_accelerate", "Accelerate", imports="accelerate"),
    Program("with_transformers", "transformers", imports="transformers"),
    Program("with_peft", "PEFT", imports="peft"),
    Program("with_trl", "TRL", imports="trl", leaves=("*wandb*",)),
    Program("with_ignite", "ignite", imports="ignite"),
    Program("with_torchmetrics", "torchmetrics", imports="torchmetrics"),
    Program("with_datasets", "datasets", "datasets", leaves=_LOADERS),
    Program("with_torchdata", "torchdata", imports="torchdata", leaves=_LOADERS),
    Program("with_torchao", "torchao", imports="torchao", first_step_s=_COMPILED_S),
    Program("with_fairscale", "fairscale", imports="fairscale"),
    Program(
        "with_deepspeed",
        "DeepSpeed",
        imports="deepspeed",  # It compiles an extension in C++ for its collectives on CPUs.
        first_step_s=_COMPILED_S,
    ),
)
