#!/bin/sh
# on_node.sh NODE COMMAND…: becomes COMMAND on a node of tests/nodes.py, in the folder where it was called. NODE is the
# node's cgroup; beside it is that of its holder, whose namespaces are the node's. It ends with the thread that started it.
set -eu
node=$1
shift
read -r holder <"$node.holder/cgroup.procs"
echo 0 >"$node/cgroup.procs"
# Entering a mount namespace leads to its root folder.
exec setpriv --pdeathsig KILL nsenter --target "$holder" --net --uts --mount sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"
