#!/usr/bin/env bash
# main_ppo on machines that ssh reaches without a password: a Ray cluster, the program, and the end of the cluster.
#
#   HOSTS="node2 node3" GPUS=8 bash examples/cluster/ssh.sh key=value ...      on the first machine, in the checkout
#
# The checkout is at the same path on all machines. HOSTS="" is this machine alone. REMOTE starts a command there.
set -uo pipefail
cd "$(dirname "$0")/../.."
. examples/cluster/functions.sh
HOSTS=${HOSTS-}
GPUS=${GPUS:-1}
PORT=${PORT:-6379}
REMOTE=${REMOTE:-ssh -o BatchMode=yes}

make_token
token=$($RAY get-auth-token)
address=$(own_address):$PORT
started=()
end() { for process in "${started[@]}"; do kill "$process" 2>/dev/null; done; wait; }
trap end EXIT
start_head "$PORT" >ray-head.log 2>&1 &
started+=($!)
number=1
for host in $HOSTS; do
  number=$((number + 1))
  $REMOTE "$host" "cd '$PWD' && export RAY_AUTH_TOKEN='$token' RAY='$RAY' PYTHON='$PYTHON' && . examples/cluster/functions.sh && start_worker $address" >"ray-$host.log" 2>&1 &
  started+=($!)
done
export RAY_ADDRESS=$address
wait_for_nodes "$address" "$number" || exit 1
run_program $PYTHON -m hybridrl.main_ppo trainer.nnodes="$number" trainer.n_gpus_per_node="$GPUS" "$@"
