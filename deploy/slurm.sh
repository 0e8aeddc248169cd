#!/usr/bin/env bash
# Two nodes, one NCCL job: `tcpx perf` between them first, then torchrun.
#
#   tcpx key ~/tcpx.key                      # once; the file is readable by you alone, on all nodes
#   sbatch deploy/slurm.sh train.py ARGS...
#
#SBATCH --job-name=tcpx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=128G
#SBATCH --time=01:00:00
set -euo pipefail
: "${1:?usage: sbatch slurm.sh PROGRAM.py ARGS...}"

# The tarball or the package; the plugin lies beside the program.
plugin=$(dirname "$(readlink -f "$(command -v tcpx)")")/libnccl-net-tcpx.so
TCPX_KEY=$(cat "${TCPX_KEY_FILE:-$HOME/tcpx.key}")
export TCPX_KEY
leader=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ulimit -n "$(ulimit -Hn)"

# GPU 0 of all nodes, each pair and direction: stops the job where the network does not work.
srun tcpx perf --gpu 0 --wait 10m

# NCCL_NET makes NCCL fail rather than fall back to its own sockets in silence.
export NCCL_NET_PLUGIN=$plugin NCCL_NET_PLUGIN_REF_COUNT=1 NCCL_NET=TCPX
# `tcpx status` on a node, as the same user, shows its ranks.
exec srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
  --rdzv-backend c10d --rdzv-endpoint "$leader:29500" --rdzv-id "$SLURM_JOB_ID" "$@"
