#!/usr/bin/env bash
# Captures of CUDA graphs and addresses of the program, on a host with a GPU: scripts/gpu-memory.sh OUT_DIR
#
# Needs gpu_check in TCPX_BIN (default .carry), as scripts/build-carry.sh makes it, and nothing else. Correctness alone,
# in less than a minute; exits with 1 if a step failed. OUT_DIR gets steps.txt and log.txt.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 60 'gpu_check' "$@"
[ "$rehearse" = no ] || { echo 'captures need a GPU: there is nothing to rehearse' >&2; exit 2; }

step 'addresses are asked about, and moved or refused' 20 "$bin/gpu_check" pointers
step 'captures survive copies, memory and fences' 40 "$bin/gpu_check" capture
finish
