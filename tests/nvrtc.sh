#!/usr/bin/env bash
# Compiles every kernel of the workspace by NVIDIA's own compiler, which needs no GPU, and holds
# registers and spills to tests/nvrtc/kernels.txt.
#
#   tests/nvrtc.sh [--write]      --write writes the table anew
#
# The compiler comes as a wheel, once, into TESSERA_NVRTC (tessera/nvrtc-VERSION of the cache folder
# by default), which needs python3 with venv.
set -euo pipefail
cd "$(dirname "$0")/.."
version=12.8.93
venv="${TESSERA_NVRTC:-${XDG_CACHE_HOME:-$HOME/.cache}/tessera/nvrtc-$version}"
library() { compgen -G "$venv/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"; }
if ! library >/dev/null; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps \
    "nvidia-cuda-nvrtc-cu12==$version"
fi
"$venv/bin/python" tests/nvrtc/check.py "$(library)" . tests/nvrtc/kernels.txt "$@"
