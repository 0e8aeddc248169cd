#!/usr/bin/env bash
# What torch's work on a GPU feels of tcpx, from Python, NIXL and C: scripts/gpu-torch.sh OUT_DIR
#
# Needs in TCPX_BIN (default .carry): gpu_ends with libtcpx.so and the wheel, as
# scripts/build-carry.sh puts them there; python3 with torch and a NIXL wheel. The package is
# unpacked from the wheel, the plugin put where the NIXL wheel looks for plugins. 100 captures of
# CUDA graphs on streams of both kinds, in all modes, beside transfers and connections of every
# kind; then programs that reset the GPU, return or exit amid transfers: none may end by a signal.
# In less than four minutes; exits with 1 if a step failed. OUT_DIR gets steps.txt and log.txt.
set -uo pipefail

here=$(dirname "$(realpath "$0")")
# shellcheck source-path=SCRIPTDIR source=gpu_run.sh
. "$here/gpu_run.sh"
begin 230 'gpu_ends libtcpx.so libplugin_TCPX.so' "$@"
[ "$rehearse" = no ] || { echo 'torch needs a GPU here: there is nothing to rehearse' >&2; exit 2; }
package=$(mktemp -d)
python3 -m zipfile --extract "$bin"/tcpx-*.whl "$package" || exit 2
export PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH}
plugins=$(python3 -c 'import importlib.util as u, pathlib as p
print(p.Path(u.find_spec("nixl_cu13").origin).parent.parent / ".nixl_cu13.mesonpy.libs" / "plugins")') || exit 2
cp "$bin/libplugin_TCPX.so" "$plugins/"

share_gpu
trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$service" "$package"' EXIT
step '100 captures beside transfers of all kinds' 90 python3 "$here/gpu_torch.py" captures 100
TCPX_LOCAL=off step '100 captures, over TCP' 90 python3 "$here/gpu_torch.py" captures 100
# A reset ends what others have in a context that the service shares.
echo quit | nvidia-cuda-mps-control
unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
trap 'rm -rf "$service" "$package"' EXIT
# Over TCP, which takes its time.
export TCPX_LOCAL=off
for way in reset return exit; do
  step "C: $way amid transfers" 30 "$bin/gpu_ends" "$way"
  for door in python nixl; do
    step "$door: $way amid transfers" 40 python3 "$here/gpu_torch.py" ends "$door" "$way"
  done
done
grep -hE '^\{|puts ended|FAILED' "$log"
finish
