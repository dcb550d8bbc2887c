#!/bin/sh
# ray-node head|worker [OPTION OF ray start]...: run a node of the cluster at RAY_ADDRESS in the foreground.
set -eu

role=$1
shift
host=${RAY_ADDRESS%:*}
port=${RAY_ADDRESS##*:}

case $role in
  head)
    # The head is on two networks; nodes connect on the network in which it has this name.
    ip=$(getent hosts "$host" | awk '{ print $1; exit }')
    unset RAY_ADDRESS
    exec ray start --head --block --node-ip-address="$ip" --port="$port" \
      --dashboard-host=0.0.0.0 --dashboard-port=8265 "$@"
    ;;
  worker)
    exec ray start --block --address="$RAY_ADDRESS" "$@"
    ;;
  *)
    echo "ray-node: $role: write head or worker" >&2
    exit 2
    ;;
esac
