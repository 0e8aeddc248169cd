#!/usr/bin/env bash
# Runs the program as the containers of this folder run it: `deploy/confined.sh PATH_TO_TCPX`.
#
# Two processes in network namespaces of their own stand for two pods. Each has its own mounts,
# process numbers and host name; a read-only root and a read-only /tmp; user 65532, no capability,
# no new privileges; NOFILE descriptors and MEMORY_MIB MiB. /run/tcpx alone can be written to, as
# the volume `run` of the manifests. Needs root; changes nothing of the host that does not end with
# it. `--report` also prints what each process used.
set -euo pipefail

# --- inside: one pod; its network and cgroup are set up, its mounts are not
# ------------------------------------
if [ "${1:-}" = --inside ]; then
  work=$2 name=$3 nofile=$4
  shift 4
  mount --make-rprivate /
  hostname "$name"
  # Every mount below the root has flags of its own; those that the system itself needs stay as they
  # are.
  mount --bind / "$work/root-$name" && mount -o remount,bind,ro "$work/root-$name"
  root=$work/root-$name
  mount -t tmpfs -o ro,size=4k tmpfs "$root/tmp"
  mount -t tmpfs -o size=16m tmpfs "$root/run"
  mkdir -p "$root/run/tcpx" "$root/run/files" && chown 65532:65532 "$root/run/tcpx"
  mount --bind "$work/tcpx" "$root/run/files" && mount -o remount,bind,ro "$root/run/files"
  mount --bind "$work/hosts" "$root/etc/hosts"
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  cd "$root" && pivot_root . mnt && cd / && umount -l mnt
  ulimit -n "$nofile"
  exec setpriv --reuid 65532 --regid 65532 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs \
    env -i PATH=/run/files:/usr/sbin:/usr/bin:/sbin:/bin XDG_RUNTIME_DIR=/run/tcpx "$@"
fi

program=$(readlink -f "${1:?usage: deploy/confined.sh PATH_TO_TCPX [--report]}")
report=${2:-}
if [ "$(id -u)" != 0 ] || ! unshare --net --mount --pid --fork true 2>/dev/null; then
  echo 'skipped: confined: namespaces, mounts and limits of memory need root'
  exit 0
fi
for one in ip curl setpriv nsenter; do
  if ! command -v "$one" >/dev/null; then echo "skipped: confined: $one is missing"; exit 0; fi
done
nofile=${NOFILE:-256} memory_mib=${MEMORY_MIB:-1024}
work=$(mktemp -d)
a=tcpx-$$-a b=tcpx-$$-b cgroup=''
cleanup() {
  local one
  # Changing the user takes away what would end a process with its parent: each is ended in its
  # namespace.
  for one in "$a" "$b"; do
    # shellcheck disable=SC2046 # a list of numbers
    kill -KILL $(ip netns pids "$one" 2>/dev/null) 2>/dev/null || true
  done
  wait 2>/dev/null || true
  for one in "$a" "$b"; do ip netns del "$one" 2>/dev/null || true; done
  # The last process of a group ends a moment after its signal.
  for _ in $(seq 100); do
    if [ -z "$cgroup" ] || ! [ -d "$cgroup" ]; then break; fi
    for one in "$cgroup"/[ab] "$cgroup"; do rmdir "$one" 2>/dev/null || true; done
    sleep 0.1
  done
  rm -rf "$work"
}
trap cleanup EXIT
# The output of what runs beside it is shown at a failure alone.
set -E
trap 'failed "$LINENO: $BASH_COMMAND"' ERR
failed() {
  tail -n 20 "$work"/server "$work"/client 2>/dev/null || true
  echo "deploy/confined.sh: failed in line $1"
}
mkdir "$work/tcpx" "$work/root-a" "$work/root-b"
chmod 755 "$work" "$work/tcpx"
cp "$program" "$work/tcpx/tcpx"
printf '127.0.0.1 localhost\n10.77.91.1 pair-0.pair\n10.77.91.2 pair-1.pair\n' >"$work/hosts"
chmod 644 "$work/hosts"

# A limit of memory where this host has a controller for it.
for parent in /sys/fs/cgroup/memory /sys/fs/cgroup; do
  at=$parent/tcpx-confined-$$
  if ! [ -d "$parent" ] || ! mkdir "$at" 2>/dev/null; then continue; fi
  if [ -w "$at/memory.limit_in_bytes" ]; then limit=memory.limit_in_bytes peak=memory.max_usage_in_bytes; else
    echo +memory >"$at/cgroup.subtree_control" 2>/dev/null || true
    limit=memory.max peak=memory.peak
  fi
  mkdir "$at/a" "$at/b"
  if [ -w "$at/a/$limit" ]; then
    cgroup=$at
    for one in a b; do echo $((memory_mib << 20)) >"$cgroup/$one/$limit"; done
    break
  fi
  rmdir "$at/a" "$at/b" "$at"
done
[ -n "$cgroup" ] || echo 'skipped: confined: limit of memory: this host has no controller for it'

ip netns add "$a"
ip netns add "$b"
ip -n "$a" link add eth0 type veth peer name eth0 netns "$b"
for one in "$a 10.77.91.1/24" "$b 10.77.91.2/24"; do
  read -r netns address <<<"$one"
  ip -n "$netns" link set lo up
  ip -n "$netns" addr add "$address" dev eth0
  ip -n "$netns" link set eth0 up
done

# pod a|b COMMAND...: in its namespaces, under its limits.
pod() {
  local one=$1 netns=tcpx-$$-$1
  shift
  if [ -n "$cgroup" ]; then echo "$BASHPID" >"$cgroup/$one/cgroup.procs"; fi
  exec ip netns exec "$netns" unshare --mount --uts --ipc --pid --fork --kill-child \
    "$(readlink -f "$0")" --inside "$work" "$one" "$nofile" "$@"
}
say() { printf '\n== %s\n' "$*"; }
used() {
  [ -n "$report" ] && [ -n "$cgroup" ] || return 0
  for one in a b; do printf '%s: %d MiB at most\n' "$one" $(($(cat "$cgroup/$one/$peak") >> 20)); done
}

say 'neither the root nor /tmp takes a file, and no right is left'
(pod a sh -c '! touch /tmp/x 2>/dev/null && ! touch /usr/x 2>/dev/null && id && ulimit -n &&
  grep -E "^(CapEff|CapBnd|NoNewPrivs)" /proc/self/status')

"$program" key "$work/key" >/dev/null
key=$(cat "$work/key")

say 'tcpx perf, started as an indexed job'
job=(env TCPX_KEY="$key" WORLD_SIZE=2 MASTER_ADDR=pair-0.pair)
measure=(tcpx perf --host --size 64MiB --rounds 2 --wait 2m)
(pod b "${job[@]}" JOB_COMPLETION_INDEX=1 "${measure[@]}") &
second=$!
(pod a "${job[@]}" JOB_COMPLETION_INDEX=0 "${measure[@]}")
wait "$second"
used

say 'a server that stays, its metrics and its status'
(pod a env TCPX_KEY="$key" TCPX_METRICS=10.77.91.1:9400 tcpx perf server host --keep) >"$work/server" 2>&1 &
listens() { ip netns exec "$a" cat /proc/net/tcp /proc/net/tcp6 | grep -q ':3039 .* 0A '; } # 12345
for _ in $(seq 600); do
  if listens; then break; fi
  sleep 0.1
done
# Runs until this script has seen what it wants.
(pod b env TCPX_KEY="$key" tcpx perf client 10.77.91.1 host -s 16MiB -t 10m --wait 2m) >"$work/client" 2>&1 &
client=$!
server=''
for _ in $(seq 600); do
  for pid in $(ip netns pids "$a"); do
    if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = tcpx ]; then server=$pid; fi
  done
  if ip netns exec "$a" curl -fs http://10.77.91.1:9400/metrics >"$work/metrics" &&
    grep -q '^tcpx_connections 1' "$work/metrics"; then break; fi
  if ! kill -0 "$client" 2>/dev/null; then cat "$work/server" "$work/client"; exit 1; fi
  sleep 0.1
done
grep -E '^tcpx_(connections|lanes|operations_stalled) ' "$work/metrics"
number=$(awk '/^NSpid/ { print $NF }' "/proc/$server/status")
socket=/proc/$server/root/run/tcpx/tcpx/$number.sock
say "its status from the host, through $socket"
curl -fs --unix-socket "$socket" http://tcpx/status | grep -q '"schema":"tcpx.process"'
say 'and by the program in its namespaces, as `kubectl exec POD -- tcpx status`'
nsenter --target "$server" --mount --pid --setuid 65532 --setgid 65532 \
  env XDG_RUNTIME_DIR=/run/tcpx /run/files/tcpx status
if [ -n "$report" ]; then printf 'descriptors of the server: %d\n' "$(find "/proc/$server/fd" -mindepth 1 | wc -l)"; fi
used
echo PASSED
