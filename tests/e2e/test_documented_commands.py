"""Every command of README.md and docs/*.md is run: here, or by the test that its entry names.

A command without an entry in one of the tables below fails, and so does an entry whose command is in no page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.launcher.options.options import parse
from tests.documents import PAGES, PROGRAMS, blocks, fences
from tests.etcd import Etcd, binary
from tests.harness import REPOSITORY, Job, environment, script, slow
from tests.standin import WITH_TORCH

pytestmark = pytest.mark.usefixtures("without_torch")

TRAIN = """
import os, pathlib, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while pathlib.Path("hold").exists():
    time.sleep(0.05)
"""

# Commands that run as they stand, in a folder with train.py and script.py, with words of their output.
HERE = {
    "elaunch train.py": "rank 0 of 1",
    'elaunch train.py; echo "exit code $?"': "exit code 0",
    "elaunch --nproc-per-node 8 train.py": "rank 7 of 8",
    "elaunch --nproc-per-node 2 train.py": "rank 1 of 2",
    "elaunch --nproc-per-node 3 script.py": "rank 2 of 3",
    "elaunch --no-preload --nproc-per-node 2 train.py": "rank 1 of 2",
    "elaunch --role ps=1,trainer=3 train.py": "rank 3 of 4",
    "elaunch --max-restarts 0 --nproc-per-node 1 train.py": "rank 0 of 1",
    "OMP_NUM_THREADS=1 elaunch --nproc-per-node 1 --max-restarts 0 train.py": "rank 0 of 1",
    "elaunch --max-restarts 0 --nproc-per-node 2 train.py": "rank 1 of 2",
    "elaunch --on-hang restart --log-dir logs --nproc-per-node 2 train.py": "rank 1 of 2",
    "elaunch --hang-timeout 120 --nproc-per-node 2 train.py": "rank 1 of 2",
    "elaunch --nproc-per-node 2 --log-dir logs train.py": "; output in ",
    "elaunch --log-format json --nproc-per-node 2 train.py": '"stream": "stdout", "text": "rank 1 of 2"',
    "elaunch report logs": "succeeded after",
    "elaunch report --json logs": '"outcome": "succeeded"',
    "cat logs/latest/timeline.jsonl": '"event": "sealed"',
    "elaunch --nproc-per-node 1 --no-python env": "MASTER_ADDR=127.0.0.1",
    "elaunch --nproc-per-node 2 --no-python sh -c 'CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec python train.py \"$@\"' sh"
    " --lr 3": "1 of 2",
    "elaunch --help": "Exit codes:",
    "(umask 077; openssl rand -hex 16 > ~/job.token)": "",
    "_ELAUNCH_COMPLETE=bash_source elaunch > ~/.elaunch-completion.bash": "",
}
# Commands that run with --dry-run added, so that no scheduler gets a job.
DRY = {
    "elaunch submit slurm --nodes 4 --gpus 8 --time 24:00:00 train.py": "#SBATCH --nodes=4",
    "elaunch submit slurm --nodes 2 --gpus 8 --time 24:00:00 train.py": "#SBATCH --nodes=2",
    "elaunch submit slurm --nodes 3:4 --gpus 8 --partition h100 --account me train.py": "#SBATCH --nodes=3-4",
    "elaunch submit slurm --nodes 4 --gpus 8 --time 24:00:00 --dry-run train.py --lr 0.1": "train.py --lr 0.1",
    "elaunch submit k8s --nodes 4 --gpus 8 --image you/train:1 train.py": "image: you/train:1",
    "elaunch submit k8s --image registry/you/train:1 --nodes 2 --gpus 8 train.py --lr 3e-4": "completions: 2",
    "elaunch submit k8s --writable-image --image registry/you/train:1 train.py": "readOnlyRootFilesystem: false",
    "elaunch submit k8s --image registry/you/train@sha256:… train.py": "image: registry/you/train@sha256:",
}
# Commands that run against an etcd of the test's own, each block in one shell.
ETCD = {
    "etcdctl endpoint status --cluster --write-out=table": "IS LEADER",
    "etcdctl alarm list": "",
    "revision=$(etcdctl endpoint status --write-out=json"
    " | grep -o '\"revision\":[0-9]*' | head -n 1 | cut -d: -f2)": "",
    "etcdctl compact $revision": "compacted revision",
    "etcdctl defrag --cluster": "Finished defragmenting",
    "etcdctl alarm disarm": "",
    "etcdctl get --prefix --keys-only /elaunch/night/": "/elaunch/night/ctl/spec",
    "etcdctl get --prefix /elaunch/night/": "/elaunch/night/ctl/spec",
    "etcdctl role add vision": "Role vision created",
    "etcdctl role grant-permission vision readwrite /teams/vision/ --prefix=true": "Role vision updated",
    "etcdctl user add vision": "User vision created",
    "etcdctl user grant-role vision vision": "Role vision is granted to user vision",
}
# Commands that another test runs.
ELSEWHERE = {
    "elaunch --role ps=1,trainer=3 examples/rpc/parameter_server.py": (
        "test_the_death_of_a_process_changes_nothing_of_the_result"
    ),
    "elaunch --nnodes 2 --rdzv-endpoint node0:2379 --role ps --nproc-per-node 1 train.py": (
        "test_agents_of_one_job_may_have_a_role_each"
    ),
    "elaunch --nnodes 2 --rdzv-endpoint node0:2379 --role trainer --nproc-per-node 3 train.py": (
        "test_agents_of_one_job_may_have_a_role_each"
    ),
    "elaunch doctor": "test_this_node_can_train",
    "elaunch --warm train.py": "test_the_next_job_starts_from_it_with_an_environment_of_its_own",
    "elaunch warm": "test_status_says_what_is_there_and_stop_ends_it",
    "elaunch warm --stop": "test_status_says_what_is_there_and_stop_ends_it",
    "export ELAUNCH_WARM=15": "test_warm_alone_is_a_quarter_of_an_hour",
    "elaunch --metrics-port 9400 --nproc-per-node 2 train.py": "test_a_failed_and_restarted_job_shows_both",
    "elaunch --on-event ./notify.sh --nproc-per-node 2 train.py": (
        "test_the_script_of_the_page_posts_what_happened_and_the_job_does_not_wait_for_it"
    ),
    "elaunch --nproc-per-node 2 -m elaunch.trainer --out runs/s3 --checkpoints s3://bucket/first": (
        "test_the_command_for_an_object_store_works_and_goes_on_from_there"
    ),
    "elaunch status": "test_without_arguments_a_user_finds_the_own_jobs_and_nobody_elses",
    "elaunch top": "test_top_draws_the_job_anew_each_second_until_q_or_a_signal_and_leaves_the_terminal_as_it_was",
    "elaunch stacks": "test_stacks_groups_ranks_by_where_they_are",
    "elaunch stop night": "test_a_job_is_restarted_and_stopped_from_its_host_and_from_elsewhere",
    "elaunch restart night": "test_a_job_is_restarted_and_stopped_from_its_host_and_from_elsewhere",
    "elaunch rehearse --steps 40 --nproc-per-node 2 train.py": (
        "test_a_right_script_comes_back_equal_and_its_checkpoints_are_left_alone"
    ),
    "elaunch status --json": "test_status_shows_ranks_steps_the_last_failure_and_what_is_left_of_the_budget",
    "elaunch status night --rdzv-endpoint node0:2379 --token-file ~/job.token": (
        "test_two_nodes_are_asked_from_a_third_place_with_the_token"
    ),
    "accelerate launch --config_file accelerate.yaml --num_processes 1 --no_python env"
    " | grep -E '^(ACCELERATE|FSDP|PARALLELISM)_' > accelerate.env": (
        "test_accelerates_configuration_reaches_the_workers_as_the_page_says"
    ),
    "env $(cat accelerate.env) elaunch --nproc-per-node 8 train.py": (
        "test_accelerates_configuration_reaches_the_workers_as_the_page_says"
    ),
    "flux run -N 4 elaunch train.py": "test_flux_run_elaunch_needs_no_flag_and_ranks_follow_the_nodes",
    "pip install .": "test_every_module_is_in_the_wheel_and_can_be_imported_from_it",
    "pip install elaunch": "test_every_module_is_in_the_wheel_and_can_be_imported_from_it",
    'ps -efww --forest | grep -A 5 "[e]launch"': "test_a_running_jobs_processes_are_shown",
    "elaunch --nproc-per-node 2 -m elaunch.trainer --out runs/first": "test_the_first_training_of_the_documentation",
    "python -m elaunch.trainer.ledger runs/x/ledger --steps 400": (
        "test_the_command_says_one_sentence_and_exits_with_the_verdict"
    ),
    "elaunch --nnodes 2 --rdzv-endpoint node0:2379 train.py": (
        "test_two_lines_start_a_job_on_two_nodes_and_nothing_is_left_of_it"
    ),
    "elaunch --nnodes 2 --nproc-per-node 1 --rdzv-endpoint localhost:2379 train.py": (
        "test_two_terminals_of_one_host_need_no_token"
    ),
    "elaunch --nnodes 2 --rdzv-endpoint node0:2379 --token-file ~/job.token train.py": (
        "test_a_log_gets_the_name_of_the_tokens_file_and_not_the_token"
    ),
    "elaunch --nnodes 2:4 --run-id night --rdzv-endpoint etcd-a:2379,etcd-b:2379,etcd-c:2379 train.py": (
        "test_a_killed_etcd_leader_costs_nothing"
    ),
    "elaunch --nnodes 2 --rdzv-endpoint https://a:2379,b:2379,c:2379"
    " --rdzv-conf user=vision,password_file=FILE,etcd_prefix=/teams/vision train.py": (
        "test_jobs_of_one_name_under_two_prefixes_do_not_meet_and_neither_team_reads_the_others_keys"
    ),
    "srun --nodes=4 --ntasks-per-node=1 elaunch train.py": (
        "test_srun_elaunch_needs_no_flag_and_ranks_follow_the_nodes"
    ),
    "elaunch doctor --nnodes 2 --rdzv-endpoint node0:2379 --token-file ~/job.token": (
        "test_a_store_is_timed_and_refuses_a_wrong_token"
    ),
    'srun --ntasks-per-node=1 elaunch doctor | grep ": bad"': (
        "test_each_node_of_a_slurm_job_is_examined_with_the_needs_of_that_job"
    ),
    "srun --nodes=2 --ntasks-per-node=1 elaunch train.py": (
        "test_srun_elaunch_needs_no_flag_and_ranks_follow_the_nodes"
    ),
    "cp deploy/slurm/train.sbatch .": "test_the_script_that_is_shipped_is_the_one_that_submit_writes",
    "sbatch train.sbatch": "test_submit_writes_and_submits_what_runs",
    "env -u ELAUNCH_MARKER sbatch upload.sbatch": ("test_a_job_that_a_worker_hands_in_outlives_that_workers_restart"),
    "deploy/k8s/etcd/certificates.sh NAMESPACE": (
        "test_an_elastic_job_over_the_etcd_outlives_its_first_pod_and_a_member"
    ),
    "kubectl apply --namespace NAMESPACE -k deploy/k8s/etcd": "test_the_server_takes_the_manifests",
    'eval "$(_ELAUNCH_COMPLETE=bash_source elaunch)"': ("test_a_tab_in_a_real_shell_completes_an_option_and_its_value"),
    'eval "$(_ELAUNCH_COMPLETE=zsh_source elaunch)"': "test_a_tab_in_a_real_shell_completes_an_option_and_its_value",
    "man -l docs/elaunch.1": "test_groff_renders_it_without_a_warning_and_with_every_option_and_command",
    "python -m elaunch.launcher.options.man > docs/elaunch.1": "test_the_page_is_the_one_that_the_commands_make",
    "make bench": "test_a_whole_run_prints_its_tables_and_makes_the_page",
    'make bench N=5 ARGS="--only restart --workers 2"': "test_a_part_prints_its_tables_and_leaves_the_page",
    'make bench N=8 ARGS="--only scale --agents 64,1024"': "test_what_agents_ask_is_what_etcd_has_seen",
    'make bench ARGS="--only state-restart,state-cost"': (
        "test_a_restart_with_the_keeper_loses_nothing_and_has_all_stages"
    ),
    "elaunch --nproc-per-node 2 --log-dir logs -m elaunch.trainer --out runs/seen --profile 10-12": (
        "test_the_traces_of_all_ranks_are_joined_and_the_table_has_each_rank"
    ),
    "python -m elaunch.trainer.profiling node-a/profile node-b/profile -o trace.json.gz": (
        "test_each_rank_is_a_process_of_the_joined_file_and_so_is_each_of_its_gpus"
    ),
    "elaunch --nproc-per-node 4 -m elaunch.trainer --parallel fsdp2": (
        "test_a_plan_has_the_losses_and_the_weights_of_one_process"
    ),
    "elaunch --nproc-per-node 2 -m elaunch.trainer --bucket-mb 1 --out runs/ddp": (
        "test_a_killed_worker_changes_nothing_in_the_result"
    ),
    "elaunch --nproc-per-node 2 -m elaunch.trainer --comm-hook powersgd --powersgd-rank 2 --out runs/powersgd": (
        "test_a_killed_worker_changes_nothing_in_the_result"
    ),
    "elaunch --nproc-per-node 2 -m elaunch.trainer --parallel auto --out runs/auto": (
        "test_a_worker_that_dies_while_plans_are_measured_and_one_that_dies_in_a_step_cost_no_step"
    ),
    "elaunch --nproc-per-node 2 examples/c10d/collectives.py": "test_an_example_shows_what_it_says",
    "elaunch --nproc-per-node 2 examples/ddp/buckets.py": "test_an_example_shows_what_it_says",
    "elaunch --nproc-per-node 2 examples/ddp/hooks.py": "test_an_example_shows_what_it_says",
    "make gpu": "test_make_gpu_without_a_gpu_says_so_in_one_sentence_and_runs_nothing",
    "make gpu NANOGPT=~/nanoGPT": "test_nanogpts_loop_runs_in_a_folder_of_its_own_and_its_files_stay_as_they_are",
    "make gpu PYTHON=/opt/torch/bin/python": "test_torch_is_asked_in_the_interpreter_that_is_named",
    ".venv/bin/python -m pytest tests/sim": "test_a_job_that_was_killed_goes_on_while_its_keys_are_there",
    # With the libraries that `make ecosystem` installs.
    "WANDB_MODE=offline elaunch --nproc-per-node 8 train.py": "test_a_program_survives_a_kill_and_leaves_nothing",
    "elaunch --nproc-per-node 1 launcher.py": "test_a_program_survives_a_kill_and_leaves_nothing",
    "elaunch --nproc-per-node 8 lora.py": "test_a_program_survives_a_kill_and_leaves_nothing",
    "elaunch --nproc-per-node 8 run.py --output_dir out": "test_a_program_survives_a_kill_and_leaves_nothing",
    "elaunch --nproc-per-node 8 sft.py": "test_a_program_survives_a_kill_and_leaves_nothing",
    "elaunch --nproc-per-node 8 train.py fit --trainer.devices 8": "test_a_program_survives_a_kill_and_leaves_nothing",
    "elaunch --nproc-per-node 8 train.py optimizer.lr=0.01 hydra.run.dir=runs/night": (
        "test_a_program_survives_a_kill_and_leaves_nothing"
    ),
}
NEEDS_CLUSTER = "needs a Kubernetes cluster with a registry"
NEEDS_DOCKER = "needs Docker; hadolint checks the Dockerfile"
NEEDS_GPU = "needs a GPU"
NEEDS_CONTAINERS = "needs enroot, pyxis or Apptainer"
NEEDS_SSH = "needs an sshd; another test runs its options"
# Commands that no test runs, with the reason.
NOBODY = {
    "make demo": "makes a .venv; test_the_demo_kills_two_ranks_and_ends_equal_to_the_undisturbed_run runs its program",
    "make test": "is what runs this",
    'make bench ARGS="--only nodes-restart,nodes-loss,scale"': "takes an hour, as root",
    ".venv/bin/python -m bench --render runs/bench/A.json runs/bench/B.json": "needs the samples of two long runs",
    "$EDITOR train.sbatch": "is for a person",
    "kill -9 PID": "needs the reader's pid; test_a_killed_worker_costs_no_step kills another",
    "elaunch --nproc-per-node 8 train.py --deepspeed_config ds.json": "was not yet seen to go on after a kill",
    "docker build -f deploy/docker/Dockerfile -t you/elaunch .": NEEDS_DOCKER,
    'docker run --rm --gpus all --shm-size 16g -v "$PWD":/workspace you/elaunch train.py': NEEDS_DOCKER,
    'docker run --rm --network host -e ELAUNCH_TOKEN -v "$PWD":/workspace you/elaunch --nnodes 2'
    " --rdzv-endpoint node0:2379 train.py": NEEDS_DOCKER,
    'srun -N 2 --ntasks-per-node=1 --container-image=you/elaunch --container-mounts="$PWD:/workspace"'
    " elaunch train.py": NEEDS_CONTAINERS,
    'enroot start --mount "$PWD:/workspace" you+elaunch elaunch train.py': NEEDS_CONTAINERS,
    "apptainer exec --nv train.sif elaunch train.py": NEEDS_CONTAINERS,
    "scp -q ~/job.token node1:": NEEDS_SSH,
    'ssh node1 "cd $PWD && elaunch --nnodes 2 --rdzv-endpoint node0:2379'
    ' --token-file ~/job.token train.py" &': NEEDS_SSH,
    "docker build -t registry/you/train:1 . && docker push registry/you/train:1": NEEDS_DOCKER,
    "kubectl logs --follow --prefix --selector job-name=train": NEEDS_CLUSTER,
    "kubectl create secret generic elaunch-token --from-literal=token=$(openssl rand -hex 16)": NEEDS_CLUSTER,
    "kubectl label namespace NAME elaunch-etcd-client=true": NEEDS_CLUSTER,
    "kubectl label namespace NAME elaunch-etcd-metrics=true": NEEDS_CLUSTER,
    "mpirun --map-by ppr:1:node -x MASTER_ADDR=node0 elaunch train.py": "needs Open MPI; its variables are played",
    'blaunch -z "$(tr " " "\\n" <<<"$LSB_HOSTS" | sort -u | xargs)" elaunch train.py': (
        "needs LSF; its variables are played"
    ),
    "flux run -N 4 -g 8 -o exit-timeout=none elaunch --nnodes 2:4 train.py": NEEDS_GPU,
    'cp "$PBS_NODEFILE" "$PBS_O_WORKDIR/nodes.$PBS_JOBID"': "needs PBS; its variables are played",
    'pbsdsh -u -- env PBS_NODEFILE="$PBS_O_WORKDIR/nodes.$PBS_JOBID"'
    ' "$(command -v elaunch)" "$PBS_O_WORKDIR/train.py"': "needs PBS; its variables are played",
    "systemd-run --user --collect ./upload.sh": "needs a user's systemd; another cgroup is played",
    "echo ./upload.sh | env -u ELAUNCH_MARKER at now": "needs atd; another cgroup is played",
}
TABLES = (HERE, DRY, ETCD, ELSEWHERE, NOBODY)


def test_every_command_has_an_entry_and_every_entry_a_command() -> None:
    documented = {command for block in blocks() for command in block.commands}
    entered = [command for table in TABLES for command in table]

    assert sorted(documented - set(entered)) == []
    assert sorted(set(entered) - documented) == []
    assert len(entered) == len(set(entered))


def test_commands_stand_in_fences_that_say_so() -> None:
    for path in PAGES:
        for language, text in fences(path.read_text()):
            if language not in ("sh", "console"):
                assert not [line for line in text.splitlines() if line.startswith(tuple(f"{p} " for p in PROGRAMS))]
        outside = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert not re.findall(rf"^    (?:\$ )?(?:{'|'.join(map(re.escape, PROGRAMS))}) .*$", outside, re.MULTILINE)


def test_each_test_that_is_named_is_there() -> None:
    there = {name for path in (REPOSITORY / "tests").rglob("test_*.py") for name in _tests(path)}

    assert sorted(set(ELSEWHERE.values()) - there) == []


def _tests(path: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)


def _parts(table: dict[str, str]) -> list[tuple[str, ...]]:
    """The commands of each block that are in the table, for one shell. A list that begins another list is left out."""
    parts = dict.fromkeys(part for block in blocks() if (part := tuple(c for c in block.commands if c in table)))
    return [part for part in parts if not any(part == other[: len(part)] for other in parts if other != part)]


def shell(folder: Path, commands: tuple[str, ...], env: dict[str, str] | None = None, typed: str = "") -> str:
    """Run the commands by bash in `folder`, which is also the home. Returns their output."""
    script(folder, TRAIN)
    script(folder, TRAIN, "script.py")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Interpreters that preload nothing start sooner. Other tests cover preloading.
    settings = {"PATH": path, "HOME": str(folder), "PET_NO_PRELOAD": "1", **(env or {})}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd=folder,
        env=environment(settings),
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


# Blocks of one command that runs a job. The quick suite runs two of them, and reads the options of all.
JOBS = [part for part in _parts(HERE) if len(part) == 1 and HERE[part[0]].startswith("rank ")]
QUICK = ("elaunch train.py", "elaunch --role ps=1,trainer=3 train.py")


@pytest.mark.parametrize("command", [part[0] for part in JOBS])
def test_the_options_of_a_command_are_read(command: str) -> None:
    variables, _, words = command.rpartition("elaunch ")

    options = parse(shlex.split(words), dict(word.split("=", 1) for word in variables.split()))

    assert options.target in ("train.py", "script.py")


@pytest.mark.parametrize(
    "commands",
    [slow(part) if part in JOBS and part[0] not in QUICK else part for part in _parts(HERE)],
    ids=" && ".join,
)
def test_a_command_does_what_the_page_says(tmp_path: Path, commands: tuple[str, ...]) -> None:
    output = shell(tmp_path, commands)

    for command in commands:
        assert HERE[command] in output


def test_what_is_submitted_is_shown_by_a_dry_run(tmp_path: Path) -> None:
    for command, words in DRY.items():
        shown = command if "--dry-run" in command else command.replace("train.py", "--dry-run train.py")
        # A digest is too long for a page.
        assert words in shell(tmp_path, (shown.replace("sha256:…", f"sha256:{'0' * 64}"),)), command


def test_the_commands_for_an_etcd_work_on_one(tmp_path: Path) -> None:
    with Etcd() as etcd:
        settings = {
            "ETCDCTL_ENDPOINTS": etcd.endpoints,
            # Of its own, it gives up after 5 s.
            "ETCDCTL_COMMAND_TIMEOUT": "120s",
            "PATH": f"{Path(binary('3.5', 'etcdctl')).parent}:/usr/bin:/bin",
        }
        job = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=0.1", "--run-id", "night", "--rdzv-endpoint")
        with Job(tmp_path, *job, etcd.endpoints, "--no-preload", str(script(tmp_path, TRAIN))) as night:
            assert night.wait() == 0, night.output
        for commands in _parts(ETCD):
            output = shell(tmp_path, commands, settings, typed="secret\nsecret\n")
            for command in commands:
                assert ETCD[command] in output, output


def test_a_running_jobs_processes_are_shown(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with Job(tmp_path, "--no-preload", "--nproc-per-node", "2", str(script(tmp_path, TRAIN))) as job:
        job.wait_for_output("rank 1 of 2")

        shown = shell(tmp_path, ('ps -efww --forest | grep -A 5 "[e]launch"',))

        (tmp_path / "hold").unlink()
        assert job.wait() == 0
    assert "guardian" in shown


def test_a_job_file_of_the_documentation_is_read(tmp_path: Path) -> None:
    (text,) = [text for language, text in fences((REPOSITORY / "docs" / "nodes.md").read_text()) if language == "yaml"]
    (tmp_path / "job.yaml").write_text(text.replace("nnodes: 2", "nnodes: 1").replace("node0", "localhost"))

    assert "rank 0 of 1" in shell(tmp_path, ("elaunch --config job.yaml",))


@pytest.mark.slow
def test_the_first_training_of_the_documentation(tmp_path: Path) -> None:
    """This test is slow: it takes half a minute on two idle cores."""
    arguments = ("--nproc-per-node", "2", "-m", "elaunch.trainer", "--out", "runs/first")
    with Job(tmp_path, *arguments, env=WITH_TORCH) as job:
        assert job.wait(900) == 0, job.output

    assert (tmp_path / "runs" / "first" / "result.json").exists()


@pytest.mark.slow
def test_the_picture_of_the_readme_is_recorded_anew(tmp_path: Path) -> None:
    """This test is slow: it runs a whole job with torch. The picture itself is made by hand now and then."""
    pytest.importorskip("pyte", reason="pyte is not installed: pip install '.[docs]'")
    picture = tmp_path / "lost-rank.svg"

    command = (sys.executable, "docs/record/record.py", str(picture))
    subprocess.run(command, cwd=REPOSITORY, env=environment(WITH_TORCH), check=True, timeout=300)

    assert "killed by SIGKILL in generation 0" in picture.read_text()
    assert "goes on after step" in picture.read_text()
