{# The batch script of `elaunch submit slurm`. srun does not inherit the job's CPUs (Slurm 22.05 and later), and must not
end all tasks if one node fails. The user's own options stand last, so they win. #}
#!/bin/bash
{% set elastic = given.nodes[0] < given.nodes[1] %}
{% for option in [
    "--job-name=" ~ name,
    "--nodes=" ~ given.nodes|unique|join("-"),
    "--ntasks-per-node=1",
    given.gpus and "--gpus-per-node=" ~ given.gpus,
    "--cpus-per-task=" ~ given.cpus if given.cpus else "--exclusive",
    given.time and "--time=" ~ given.time,
    given.partition and "--partition=" ~ given.partition,
    given.account and "--account=" ~ given.account,
    given.qos and "--qos=" ~ given.qos,
    "--signal=USR1@" ~ given.notice,
    "--no-requeue" if given.no_requeue else "--requeue",
    elastic and "--no-kill",
    "--open-mode=append",
    "--output=" ~ given.output,
] + given.sbatch|list if option %}
#SBATCH {{ option|quoted }}
{% endfor %}

# One agent on each node: it starts a worker for each GPU.
srun{% if given.cpus %} --cpus-per-task={{ given.cpus }}{% endif %} --cpu-bind=none --kill-on-bad-exit=0{% if elastic %} --no-kill{% endif %} {{ elaunch }} {{ argv|map("word")|join(" ") }}
code=$?
{% if not given.no_requeue %}
# Slurm's notice (138: SIGUSR1, 140: SIGUSR2) came before the end of the time, and training has saved. It resumes later.
if [ "$code" = 138 ] || [ "$code" = 140 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
{% endif %}
exit $code
