#!/usr/bin/env bash
# Makes this container a node of the Ray cluster that gives nothing away, then becomes the given command.
#
#   flow-run.sh COMMAND…    RAY_ADDRESS=host:port and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) in the environment
#
# A run's own process is a driver, and a driver needs a raylet beside it.
set -euo pipefail

if [[ -z ${RAY_ADDRESS:-} ]]; then
    echo "flow-run.sh: RAY_ADDRESS is not set: give the host:port of the Ray head" >&2
    exit 2
fi
if [[ -z ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]]; then
    echo "flow-run.sh: neither RAY_AUTH_TOKEN nor RAY_AUTH_TOKEN_PATH is set: the Ray head asks for its token" >&2
    exit 2
fi
(($#)) || { echo "flow-run.sh: no command: flow-run.sh COMMAND…" >&2; exit 2; }

address=$(python -c 'import socket, sys
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect((sys.argv[1], 9))  # sends nothing
print(probe.getsockname()[0])' "${RAY_ADDRESS%:*}")
ray start --address="$RAY_ADDRESS" --node-ip-address="$address" --num-cpus=0 --num-gpus=0 --disable-usage-stats
exec "$@"
