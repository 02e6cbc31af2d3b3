"""Schedulers: what each reports about this job and this node, and how a job is submitted to Slurm or Kubernetes."""
