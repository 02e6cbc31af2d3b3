"""Causes: the program itself, its command line, its imports and its crashes."""

from __future__ import annotations

import sys
from shlex import quote

from elaunch.agent.diagnosis.causes.cause import CauseRule, Evidence, Values, regex

_SIGILL, _SIGABRT, _SIGFPE, _SIGSEGV, _SIGXCPU = -4, -6, -8, -11, -24
_SAME_NAMES = (
    "torch torchvision torchaudio torchmetrics torchdata numpy scipy pandas matplotlib seaborn tqdm rich transformers"
    " datasets tokenizers accelerate diffusers peft trl evaluate safetensors huggingface_hub timm deepspeed lightning"
    " pytorch_lightning fairscale xformers bitsandbytes flash_attn triton einops sentencepiece tiktoken tensorboard"
    " tensorboardX wandb mlflow comet_ml omegaconf psutil h5py pyarrow lmdb webdataset librosa soundfile nltk spacy"
    " regex requests boto3 s3fs fsspec mpi4py ninja setuptools"
)
# The packages that have these modules. Any other name may be anybody's on a package index, so none is given for it.
_PACKAGES = {
    "cv2": "opencv-python",
    "yaml": "pyyaml",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "bs4": "beautifulsoup4",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "attr": "attrs",
    "pynvml": "nvidia-ml-py",
    "absl": "absl-py",
    "hydra": "hydra-core",
    "gin": "gin-config",
    "git": "GitPython",
    "Crypto": "pycryptodome",
    "Cryptodome": "pycryptodomex",
    "google.protobuf": "protobuf",
    "google.cloud.storage": "google-cloud-storage",
    "ruamel.yaml": "ruamel.yaml",
    "mpl_toolkits": "matplotlib",
    "distutils": "setuptools",
    "pkg_resources": "setuptools",
    **{name: name.replace("_", "-") for name in _SAME_NAMES.split()},
}
MISSING = r"No module named '?(?P<missing>\w[\w.]*)'?(?:\. Did you mean: .*)?$"
# The error of multiprocessing's spawn and forkserver in a child process.
NO_MAIN_GUARD = "current process has finished its bootstrapping phase"
_ENVIRON = regex(r'File "(?:<frozen os>|[^"]*/os\.py)", line \d+, in __getitem__')
# The end of a library's name. Patterns limit the length of names, as Linux does, and begin where a name does:
# otherwise a search takes quadratic time, and an exception may have a name of megabytes.
_SO = r"\.so[\w.]{0,64}"


def _missing(evidence: Evidence, values: Values) -> Values:
    name = values["missing"]
    parent, _, last = name.rpartition(".")
    if folder := evidence.facts.folder:
        why = f"another {parent} is found before it" if parent else "it is not on Python's path"
        step = f"{folder} has {name}, but {why}: export PYTHONPATH={quote(folder)}:$PYTHONPATH before elaunch starts"
    elif package := _PACKAGES.get(name, ""):
        step = (
            f"install {package} in the Python environment of every node (python -m pip install {package}), or put the"
            f" folder that has {name} on PYTHONPATH"
        )
    elif name in sys.stdlib_module_names:
        step = f"{name} is part of Python's standard library, and this Python is built without it: use one that has it"
    elif parent:
        # Python has found what is before the last dot.
        step = (
            f"{parent} is there, but has no {last}: check the spelling, the version of the package that has {parent},"
            f" and that no other {parent} is found first"
        )
    else:
        step = f"install the package that has {name} on every node, or put its folder on PYTHONPATH"
    return {"step": step}


RULES = (
    CauseRule(
        "a script that takes its local rank from an argument",
        "elaunch sets the variable LOCAL_RANK, as torchrun does, and no argument, as torch.distributed.launch did: read"
        " os.environ['LOCAL_RANK'], or give the script '--local-rank=$local_rank'",
        pattern=r"(?m)^[^\s:]+: error: (?P<error>[^\n]*--local[-_]rank[^\n]*)\s*\Z",
        codes=frozenset({2}),
        detail="{error}",
    ),
    CauseRule(
        "wrong arguments of the script",
        "correct the arguments after the script; {program} --help lists them",
        pattern=r"(?m)^(?P<program>[^\s:]+): error: (?P<error>[^\n]+)\s*\Z",
        codes=frozenset({2}),
        detail="{error}",
    ),
    CauseRule(
        "circular import",
        "two files import each other: move one of the imports into the function that needs it; or a file of the program"
        " has the name of the module that it imports: give that file another name",
        pattern=r"partially initialized module .*circular import",
        exceptions=frozenset({"AttributeError", "ImportError"}),
    ),
    CauseRule(
        "a missing module",
        "{step}",
        pattern=MISSING,
        exceptions=frozenset({"ModuleNotFoundError"}),
        more=_missing,
        needs_disks=True,
        shown="install the package that has it on every node, or put its folder on PYTHONPATH; a package is named only"
        " where that is known, and a folder where the module is in the current one or in one above the script",
    ),
    CauseRule(
        "a missing library",
        "{library} is not on this node's library path: install it, or the build of the package that fits this node",
        pattern=rf"(?<![\w.+-])(?P<library>lib[\w.+-]{{1,255}}{_SO}): cannot open shared object file",
        exceptions=frozenset({"ImportError", "OSError"}),
    ),
    CauseRule(
        "an extension for another version",
        "a compiled package was built for another version of torch or of a system library: install it again in this"
        " environment",
        pattern=r"undefined symbol: |version [`']GLIBC(?:XX)?_[\d.]+' not found|DLL load failed",
        exceptions=frozenset({"ImportError", "OSError"}),
    ),
    CauseRule(
        "a variable that is not set",
        "{variable} is not set in the environment of this node's elaunch: set it there, or give the script a default",
        pattern=r"^'(?P<variable>[A-Z][A-Z0-9_]*)'$",
        exceptions=frozenset({"KeyError"}),
        more=lambda evidence, _: {} if _ENVIRON.search(evidence.traceback) else None,
    ),
    CauseRule(
        "a file or folder that exists already",
        "each restart runs the program from its beginning, and so does every rank: let it use what is there"
        " (os.makedirs(path, exist_ok=True)), or make it in rank 0 only while ELAUNCH_GENERATION is 0",
        pattern=r"\[Errno 17\] File exists",
        exceptions=frozenset({"FileExistsError"}),
    ),
    CauseRule(
        "processes started without a main guard",
        'put what starts processes under if __name__ == "__main__":, since spawn and forkserver re-import the script',
        pattern=NO_MAIN_GUARD,
        exceptions=frozenset({"RuntimeError"}),
        # The exception's own text is a page about this.
        is_enough=True,
    ),
    CauseRule(
        "an object that cannot be sent to a child process",
        "processes that are spawned get pickled objects: use a function or class at the top level of a module, not a"
        " lambda or local function",
        pattern=r"Can't (?:pickle|get) local object|Can't pickle <function|cannot pickle '",
    ),
    CauseRule(
        "a command that cannot be executed",
        "make the file executable (chmod +x) with a first line such as #!/bin/bash, or leave --no-python out for a"
        " Python script",
        codes=frozenset({126}),
        pattern=r"cannot be started: |Permission denied|cannot execute|Exec format error",
    ),
    CauseRule(
        "a command that is not found",
        "check the spelling of the command, and PATH on this node",
        codes=frozenset({127}),
        pattern=r"not found|cannot be started: No such file",
    ),
    CauseRule(
        "a crash in native code, with its Python stack",
        "native code that is called there crashed: update or rebuild that package, and check the sizes and types that"
        " it is given",
        codes=frozenset({_SIGSEGV, _SIGFPE}),
        more=lambda evidence, _: {} if evidence.crash else None,
    ),
    CauseRule(
        "an instruction that this CPU does not have",
        "a package was built for another CPU: install one that is built for this node's",
        codes=frozenset({_SIGILL}),
    ),
    CauseRule(
        "a thread of native code that still ran at the program's end",
        "end it before the program ends: call destroy_process_group(), close data loaders, writers and clients, join"
        " threads, and let no daemon thread call torch",
        codes=frozenset({_SIGABRT}),
        pattern=r"terminate called without an active exception",
    ),
    CauseRule(
        "the heap is corrupted",
        "native code has written outside of its memory: update or rebuild the compiled packages that the program uses",
        codes=frozenset({_SIGABRT}),
        pattern=r"(?P<error>(?:malloc|free|realloc|munmap_chunk|corrupted|double free)[^\n]{0,100})\s*\Z",
        detail="{error}",
    ),
)
