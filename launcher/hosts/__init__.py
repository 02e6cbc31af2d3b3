"""`elaunch --hosts` and `--hostfile`: one command starts the job on several hosts, over ssh."""
