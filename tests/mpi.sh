#!/usr/bin/env bash
# `tessera train` on ranks that are processes of an Open MPI job: tests/mpi_ranks.rs with the feature
# `mpi`. Needs Open MPI and libclang; builds in the usual target directory. Where comm/tests/mpi.sh was
# last run with another library, `cargo clean -p mpi-sys` first: bindings are of one library.
set -euo pipefail
cd "$(dirname "$0")/.."

pick() { if command -v "$1.openmpi" >/dev/null; then echo "$1.openmpi"; else echo "$1"; fi; }
# The launcher refuses the superuser, and more ranks than cores, unless told.
export TESSERA_MPIRUN="${TESSERA_MPIRUN:-$(pick mpirun) --oversubscribe --allow-run-as-root}"
# One job at a time: several would share the cores, and time limits are short.
MPICC="$(pick mpicc)" cargo test -p tessera --locked --features mpi --test mpi_ranks -- --test-threads=1
