#!/usr/bin/env bash
# Runs the tests that are generic over devices, and those of GPUs, on the stand-ins for NVIDIA's
# libraries: in several orders of streams and threads, with two GPUs.
#
#   tests/emu/run.sh [OUT]        OUT is where the stand-ins are built, target/emu by default
set -euo pipefail
cd "$(dirname "$0")/../.."
target="${CARGO_TARGET_DIR:-target}"
out="${1:-$target/emu}"
tests/emu/build.sh "$out"
out="$(cd "$out" && pwd)"
# Compiled before the stand-ins are in the way, with the features of the other tests.
programs="$(cargo test --workspace --locked --no-run --message-format=json 2>/dev/null |
  grep -oP '"executable":"\K[^"]+(?=")' | grep -P "/deps/($(paste -sd'|' tests/emu/programs.txt))-[0-9a-f]+$")"
[ -n "$programs" ] || { echo "no test programs were found" >&2; exit 1; }
# No compiled kernels of former runs.
cache="$(mktemp -d)"
trap 'rm -rf "$cache"' EXIT
for seed in 1 2 3; do
  for program in $programs; do
    echo "seed $seed: ${program##*/}"
    LD_LIBRARY_PATH="$out/lib" XDG_CACHE_HOME="$cache" TESSERA_CUDA_EXPECTED=1 \
      TESSERA_EMU_SEED=$seed TESSERA_EMU_DEVICES=2 "$program" --quiet
  done
done
