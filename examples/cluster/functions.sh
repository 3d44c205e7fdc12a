# Functions of the launchers in this directory: one Ray cluster of several machines, and one program on it.
#
#   start_head PORT                  on the first machine; start_worker HOST:PORT on the others
#   wait_for_nodes HOST:PORT N       until N machines are in the cluster, or START_TIMEOUT_S is over
#   run_program COMMAND ...          returns its exit code; SIGTERM reaches the program, which commits its step
#
# All machines need the same code and Python (RAY, PYTHON), and the same token in ~/.ray/auth_token (make_token).

RAY=${RAY:-ray}
PYTHON=${PYTHON:-python3}
START_TIMEOUT_S=${START_TIMEOUT_S:-300}
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
export RAY_worker_niceness=${RAY_worker_niceness:-0} # Ray lets workers yield to all other processes by default

make_token() { $RAY get-auth-token --generate >/dev/null; } # a home directory that all machines share needs it once

# Both replace the shell that calls them, and run until SIGTERM or the end of the cluster.
start_head() {
  exec $RAY start --head --port="$1" --node-ip-address="$(own_address)" --disable-usage-stats --include-dashboard=false --block
}

start_worker() {
  local until=$((SECONDS + START_TIMEOUT_S))
  until (exec 3<>"/dev/tcp/${1%:*}/${1##*:}") 2>/dev/null; do # the head does not listen yet
    [ "$SECONDS" -lt "$until" ] || return 1
    sleep 2
  done
  exec $RAY start --address="$1" --disable-usage-stats --block
}

own_address() { hostname -I 2>/dev/null | awk '{print $1}' | grep . || echo 127.0.0.1; }

wait_for_nodes() {
  RAY_ADDRESS=$1 timeout "$START_TIMEOUT_S" $PYTHON - "$2" <<'END' || { echo "$2 machines did not join $1 within $START_TIMEOUT_S s: look at the log of each ray start, and whether its port is open" >&2; return 1; }
import sys, time
import ray

while True:
    try:
        ray.init(log_to_driver=False, logging_level="error")
        break
    except (ConnectionError, RuntimeError, OSError):  # the head may not listen yet
        ray.shutdown()
        time.sleep(2)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(1)
END
}

run_program() {
  local code
  "$@" &
  program=$!
  trap 'kill -TERM $program 2>/dev/null' TERM
  wait "$program" && code=0 || code=$?
  while kill -0 "$program" 2>/dev/null; do # a signal ends the first wait, and the program commits its step
    wait "$program" && code=0 || code=$?
  done
  trap - TERM
  return "$code"
}
