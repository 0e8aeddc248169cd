#!/usr/bin/env bash
# Puts releases of NCCL and our plugin into a folder that goes to a GPU host without a network:
# scripts/carry-nccl.sh OUT_DIR VERSION...
#
# A release is the wheel nvidia-nccl-cu13 from the package index, as 2.31.2; scripts/gpu-nccl-one.sh
# unpacks it there. Code for GPUs other than SM (default 90) and symbols for debuggers are left out,
# which makes 16 MB of 300: SM=all keeps them. Files have at most 58 MB each. The scripts that run
# there are carried too. PLUGIN (default: the shipped profile's file, built here) is carried
# stripped.
set -euo pipefail

if [ $# -lt 2 ]; then
  echo "usage: $0 OUT_DIR VERSION..." >&2
  exit 2
fi
here=$(dirname "$(realpath "$0")")
out=$(realpath -m "$1")
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

for version in "$@"; do
  python3 -m pip download --quiet --no-deps --only-binary=:all: --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_18_x86_64 --dest "$work/$version" "nvidia-nccl-cu13==$version"
  python3 -m zipfile --extract "$work/$version"/*.whl "$work/$version"
  library=$work/$version/nvidia/nccl/lib/libnccl.so.2
  if [ "${SM:=90}" != all ]; then
    python3 "$here/nccl_trim.py" "$library" "$library.trimmed" "$SM"
    strip --strip-debug "$library.trimmed"
    mv "$library.trimmed" "$library"
  fi
  rm -f "$out/nccl-$version".*
  xz -6 --threads=2 --stdout "$library" | split --bytes=58MB --numeric-suffixes - "$out/nccl-$version.xz."
  (cd "$(dirname "$library")" && sha256sum libnccl.so.2) >"$out/nccl-$version.sha256"
  rm -rf "${work:?}/$version"
done

if [ -z "${PLUGIN:-}" ]; then
  cargo build --manifest-path "$here/../Cargo.toml" --profile shipped --locked --package tcpx-nccl
  PLUGIN=${CARGO_TARGET_DIR:-$here/../target}/shipped/libnccl_net_tcpx.so
fi
strip --strip-unneeded -o "$out/libnccl-net-tcpx.so" "$PLUGIN"
cp "$here"/{gpu-nccl-one.sh,nccl_one.py,nccl_one_table.py,nccl_report.py,nccl_environment.sh,gpu_run.sh} "$out"
ls -l "$out"
du -sh "$out"
