#!/usr/bin/env bash
# Runs every test of the workspace that needs a GPU on the stand-ins for NVIDIA's libraries: in
# several orders of streams and threads, with two GPUs, and once more under the address and
# undefined-behaviour sanitizers. A test that finds no GPU here fails instead of being skipped.
#
#   tests/emu/run.sh [OUT]        OUT is where the stand-ins are built, target/emu by default
#
# A test needs a GPU if its path has `cuda` in it, or its program's name begins so.
set -euo pipefail
cd "$(dirname "$0")/../.."
target="${CARGO_TARGET_DIR:-target}"
out="${1:-$target/emu}"
tests/emu/build.sh "$out/plain"
tests/emu/build.sh "$out/asan" asan
EMU_OUT="$(cd "$out" && pwd)"
EMU_LIBASAN="$("${CXX:-g++}" -print-file-name=libasan.so)"
# No compiled kernels of former runs; and what was run, for the last line.
XDG_CACHE_HOME="$(mktemp -d)"
EMU_RAN="$XDG_CACHE_HOME/ran"
export EMU_OUT EMU_LIBASAN EMU_RAN XDG_CACHE_HOME
trap 'rm -rf "$XDG_CACHE_HOME"' EXIT
touch "$EMU_RAN"
cargo --config "target.\"cfg(all())\".runner=\"$PWD/tests/emu/runner.sh\"" \
  test --workspace --locked --quiet --lib --tests
[ -s "$EMU_RAN" ] || { echo "tests/emu: no test has cuda in its path" >&2; exit 1; }
awk '{ tests += $1 } END { print "tests/emu: " tests " tests of " NR " programs" }' "$EMU_RAN"
