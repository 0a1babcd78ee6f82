#!/usr/bin/env bash
# Builds the stand-ins for NVIDIA's libraries, with all kernels of the workspace, by g++.
#
#   tests/emu/build.sh OUT [asan]
#
# Afterwards OUT/lib has libcuda.so.1, libnvrtc.so.12 and libcublasLt.so.12, OUT/driver-only the
# first alone, OUT/no-cublaslt the first two:
#   LD_LIBRARY_PATH=OUT/lib TESSERA_CUDA_EXPECTED=1 cargo test -p tessera-device
# With `asan`, kernels run under the address and undefined-behaviour sanitizers; the program needs
#   LD_PRELOAD="$(g++ -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0
# besides. Options of the stand-ins are at the heads of their files.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out="$(mkdir -p "$1" && cd "$1" && pwd)"
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../.." && pwd)"
cxx="${CXX:-g++}"
# As on the GPU: products and sums round apart, and no assumption on what overlaps.
flags=(-std=c++17 -O2 -g -fPIC -ffp-contract=off -fno-strict-aliasing -Wall -Wno-unknown-pragmas
  -Wno-unused-variable -Wno-unused-function -I"$here" -I"$root/device/kernels")
if [ "${2:-}" = asan ]; then
  flags+=(-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all)
fi
rm -rf "$out/obj" "$out/lib" "$out/driver-only" "$out/no-cublaslt"
mkdir -p "$out/obj" "$out/lib" "$out/driver-only" "$out/no-cublaslt"

# A unit for each file of kernels: the file, its kernels' names, its text.
shopt -s nullglob
units=("$here/libcuda.cpp")
symbol=0
for source in "$root"/*/kernels/*.cu "$root"/*/tests/kernels/*.cu; do
  name="$(basename "$source")"
  unit="$out/obj/$(basename "$(dirname "$(dirname "$source")")")-$name.cpp"
  {
    echo '#include "emu.hpp"'
    echo "#include \"$source\""
    # A kernel's name follows the return type and, perhaps, its launch bounds.
    tr '\n' ' ' <"$source" | grep -oP 'extern\s+"C"\s+__global__\s+(?:__launch_bounds__\([^)]*\)\s*)?void\s+(?:__launch_bounds__\([^)]*\)\s*)?\K\w+' |
      sort -u | while read -r kernel; do
      echo "EMU_KERNEL(\"$name\", $kernel)"
    done
    echo "EMU_TEXT(emu_text_$symbol, \"$name\", \"$source\")"
  } >"$unit"
  units+=("$unit")
  symbol=$((symbol + 1))
done
{
  echo '#include "emu.hpp"'
  for header in "$root"/*/kernels/*.cuh "$root"/*/tests/kernels/*.cuh; do
    echo "EMU_TEXT(emu_text_$symbol, \"$(basename "$header")\", \"$header\")"
    symbol=$((symbol + 1))
  done
} >"$out/obj/headers.cpp"
units+=("$out/obj/headers.cpp")

compile() { "$cxx" "${flags[@]}" -I"$(dirname "$1")" -c "$1" -o "$out/obj/$(basename "$1").o"; }
pids=()
for unit in "${units[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || exit 1; done
  compile "$unit" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done

"$cxx" "${flags[@]}" -shared -Wl,-soname,libcuda.so.1 -o "$out/lib/libcuda.so.1" "$out"/obj/*.o -ldl
"$cxx" "${flags[@]}" -shared -Wl,-soname,libnvrtc.so.12 -o "$out/lib/libnvrtc.so.12" "$here/libnvrtc.cpp"
"$cxx" "${flags[@]}" -shared -Wl,-soname,libcublasLt.so.12 -o "$out/lib/libcublasLt.so.12" "$here/libcublaslt.cpp" \
  -L"$out/lib" -l:libcuda.so.1
ln -s ../lib/libcuda.so.1 "$out/driver-only/libcuda.so.1"
ln -s ../lib/libcuda.so.1 ../lib/libnvrtc.so.12 "$out/no-cublaslt/"
echo "$out: $symbol texts of kernels"
