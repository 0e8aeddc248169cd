# shellcheck shell=bash disable=SC2034 # whoever sources it uses them
# For scripts that source it: what every run on a GPU host begins with, and its steps.

# begin BUDGET_SECONDS "FILES OF TCPX_BIN" [--rehearse] OUT_DIR: sets rehearse, bin, out, log,
# steps, command, gpus, from, to, what, cores and machine. With two GPUs data moves from GPU 0 to
# GPU 1, with one from GPU 0 to itself; --rehearse means host memory, to try the script itself on a
# host without a GPU. BUDGET in the environment is another one, for a short lease.
begin() {
  local script=scripts/${0##*/} needed=$2 file
  budget=${BUDGET:-$1} failed=0 rehearse=no command="$script OUT_DIR"
  shift 2
  [ "${1:-}" = --rehearse ] && { rehearse=yes command="$script --rehearse OUT_DIR"; shift; }
  if [ $# -ne 1 ]; then
    echo "usage: $script [--rehearse] OUT_DIR" >&2
    exit 2
  fi
  bin=$(realpath "${TCPX_BIN:-.carry}")
  for file in $needed; do
    [ -r "$bin/$file" ] || { echo "$bin/$file is missing: run scripts/build-carry.sh first" >&2; exit 2; }
  done
  mkdir -p "$1" || exit 2
  out=$(realpath "$1")
  log=$out/log.txt steps=$out/steps.txt
  : >"$log"
  : >"$steps"
  gpus=0
  [ "$rehearse" = no ] && gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  case "$rehearse$gpus" in
    yes*) from=host to=host what='in host memory standing in for a GPU' ;;
    no0) echo 'no GPU here: nvidia-smi lists none (--rehearse tries the script with host memory)' >&2; exit 2 ;;
    no1) from=0 to=0 what='on one GPU' ;;
    *) from=0 to=1 what='between GPUs' ;;
  esac
  cores=$(nproc)
  machine="$cores cores, Linux $(uname -r), loopback TCP"
  if [ "$gpus" -gt 0 ]; then
    machine="$gpus x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1), \
driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1), $machine"
  fi
}

# share_gpu: from here on two processes use a GPU at once; without it they take turns of 2 ms. Ends
# with the script, as the multi-process service does that it starts.
share_gpu() {
  service=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$service/pipe CUDA_MPS_LOG_DIRECTORY=$service/log
  mkdir "$service/pipe" "$service/log"
  nvidia-cuda-mps-control -d || { echo 'the multi-process service does not start' >&2; exit 2; }
  trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$service"' EXIT
}

# Seconds left of the whole.
left() { echo $((budget - SECONDS)); }

# limit SECONDS: that, or what is left of the whole, whichever is less.
limit() { if [ "$1" -lt "$(left)" ]; then echo "$1"; elif [ "$(left)" -gt 1 ]; then left; else echo 1; fi; }

# record NAME SECONDS STATUS: a line of the table of steps.
record() {
  local word=passed
  if [ "$3" -ne 0 ]; then
    word="FAILED ($3)"
    failed=$((failed + 1))
  fi
  printf '%-58s %5d s  %s\n' "$1" "$2" "$word" | tee -a "$steps"
}

# step NAME SECONDS COMMAND...: a command under a limit; what it prints goes into the log, and with
# into=FILE before it its standard output into that file.
step() {
  local name=$1 seconds=$2 start=$SECONDS rc
  shift 2
  printf '\n== %s: %s\n' "$name" "$*" >>"$log"
  [ -z "${into:-}" ] || : >"$into"
  timeout --kill-after=5 "$(limit "$seconds")" "$@" >>"${into:-$log}" 2>>"$log" </dev/null
  rc=$?
  record "$name" $((SECONDS - start)) "$rc"
  [ "$rc" -eq 0 ] || tail -n 3 "$log" >&2
  return "$rc"
}

# collect FILE SUBJECT FOLDER NOTE: one benchmark file out of the reports in a folder.
collect() {
  local kept=()
  for file in "$3"/*.json; do [ -s "$file" ] && kept+=("$file"); done
  [ "${#kept[@]}" -gt 0 ] || { echo 'no run gave figures' >&2; failed=$((failed + 1)); return 1; }
  into=$out/$1 step "write $1" 20 "$bin/tcpx" bench show "${kept[@]}" --json --subject "$2" --machine "$machine" \
    --command "$command" --note "$4" \
    --note 'All programs run on one host and share its cores and memory; the network is the loopback interface.'
  "$bin/tcpx" bench show "$out/$1"
}

# finish: the last line, and whether everything passed.
finish() {
  printf '\n%d steps failed; everything that was printed is in %s\n' "$failed" "$log"
  [ "$failed" -eq 0 ]
  exit
}
