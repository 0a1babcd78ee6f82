#!/usr/bin/env bash
# What run.sh has cargo start instead of a test program: the program's tests of GPUs, on the
# stand-ins, once an order of streams and once under the sanitizers.
set -euo pipefail
program="$1"
name="$(basename "$program")"
only=(cuda)
case "$name" in cuda*) only=() ;; esac
count="$("$program" --list --format terse "${only[@]}" 2>/dev/null | grep -c ': test$' || true)"
[ "$count" -gt 0 ] || exit 0
echo "$count $name" >>"$EMU_RAN"
found="${LD_LIBRARY_PATH:-}"
export TESSERA_CUDA_EXPECTED=1 TESSERA_EMU_DEVICES=2
for seed in 1 2 3; do
  export TESSERA_EMU_SEED="$seed"
  echo "tests/emu: ${name%-*}, order $seed"
  LD_LIBRARY_PATH="$EMU_OUT/plain/lib:$found" "$program" --quiet "${only[@]}"
done
echo "tests/emu: ${name%-*}, sanitizers"
# Memory is real there.
export TESSERA_EMU_MEMORY_BYTES=$((256 << 20))
LD_LIBRARY_PATH="$EMU_OUT/asan/lib:$found" LD_PRELOAD="$EMU_LIBASAN" ASAN_OPTIONS=detect_leaks=0 \
  "$program" --quiet "${only[@]}"
