#!/usr/bin/env bash
# The conformance suite and the failures under every MPI library that is here (Open MPI, MPICH; by
# Debian's names of their compilers and launchers, or else mpicc and mpirun). Needs libclang.
# Builds this crate alone, in the usual target directory. Prints a line a check and ends non-zero
# when one fails.
#
#   mpi.sh [LIBRARY...]     libraries that must be here: openmpi, mpich; none: those that are
set -euo pipefail
cd "$(dirname "$0")/../.."

programs="$(mktemp -d)"
trap 'rm -rf "$programs"' EXIT
failures=0
check() { # NAME EXPECTED_CODE(0 or 1) TEXT COMMAND...
  local name=$1 code=$2 text=$3 out start rc
  shift 3
  start=$SECONDS
  out="$(timeout -k 5 120 "$@" 2>&1)" && rc=0 || rc=$?
  # A failure must come soon; 120 s is a hang.
  if [ $((rc != 0)) = "$code" ] &&
    [ $((SECONDS - start)) -lt $((code == 0 ? 120 : 30)) ] && grep -qE -- "$text" <<<"$out"; then
    echo "ok    $name ($((SECONDS - start)) s, exit code $rc)"
  else
    echo "FAIL  $name (exit code $rc), looked for: $text"
    sed 's/^/        /' <<<"$out" | tail -40
    failures=$((failures + 1))
  fi
}

suite() { # NAME MPICC MPIRUN OPTIONS...
  local name=$1 mpicc=$2 mpirun=$3
  shift 3
  local binary="$programs/mpi-$name" built
  # Bindings are of one library, and cargo does not watch MPICC.
  cargo clean --quiet -p mpi-sys
  built="$(MPICC=$mpicc cargo test -p tessera-comm --features mpi --locked \
    --test mpi --no-run --message-format=json | grep -o '"executable":"[^"]*/mpi-[^"]*"' | tail -1 | cut -d'"' -f4)"
  cp "$built" "$binary" # the next library's takes its place
  job() { # RANKS ARGUMENTS...
    local ranks=$1
    shift
    echo "$mpirun" -n "$ranks" "${options[@]}" "$binary" "$@"
  }
  local options=("$@") ranks
  for ranks in 1 2 3 4 5 7; do
    # shellcheck disable=SC2046
    check "$name: suite on $ranks" 0 "suite: done" $(job "$ranks" suite)
  done
  check "$name: suite in pieces of 1000 bytes" 0 "suite: done" $(job 3 suite 1000)
  check "$name: a second init" 0 "can be only once" $(job 2 again)
  check "$name: mismatch" 1 "rank 0: rank 1 posted all_gather<u64> #0, rank 0 all_to_all_v<f32> #0 \(step 0, communicator 'world'\)" $(job 2 mismatch)
  check "$name: mismatch, the other side" 1 "rank 1: rank 0 posted all_to_all_v<f32> #0, rank 1 all_gather<u64> #0" $(job 2 mismatch)
  check "$name: a stopped rank" 1 "barrier #0 \(step 4, communicator 'world'\).*no message from rank 1 within 2.0 s" $(job 3 stopped)
  check "$name: a killed rank" 1 "." $(job 3 killed)
  check "$name: a rank that panics" 1 "rank [02]: barrier #0 .* given up because rank 1 failed: it panicked" $(job 3 panic)
  check "$name: a rank that leaves" 1 "rank [02]: .*rank 1 is gone: it has left the group" $(job 3 left)
  check "$name: a communicator held at the end" 1 "the end of the job \(2 communicators held\)" $(job 2 held)
}

has() { command -v "mpicc.$1" >/dev/null && command -v "mpirun.$1" >/dev/null; }
libraries=("$@")
if [ $# = 0 ]; then
  for library in openmpi mpich; do
    if has $library; then libraries+=($library); fi
  done
fi
for library in "${libraries[@]}"; do
  if ! has "$library"; then
    echo "mpicc.$library and mpirun.$library are not here: install the library"
    exit 1
  fi
  case $library in
    # The launcher refuses the superuser, and more ranks than cores, unless told.
    openmpi) suite openmpi mpicc.openmpi mpirun.openmpi --oversubscribe --allow-run-as-root ;;
    *) suite "$library" "mpicc.$library" "mpirun.$library" ;;
  esac
done
if [ ${#libraries[@]} = 0 ]; then
  suite default mpicc mpirun
fi
if [ $failures != 0 ]; then
  echo "$failures checks failed"
  exit 1
fi
echo "all checks passed"
