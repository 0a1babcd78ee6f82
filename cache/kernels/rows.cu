// Rows between a plane in device memory and a list of rows in page-locked host memory, which the
// device reads and writes over its link.
//
//   gather_rows    to[i] = plane[slots[i]]
//   scatter_rows   plane[slots[i]] = from[i], unless slots[i] is ~0
//
// A row is units of V bytes, V the widest of 16, 8, 4, 2, 1 that divides a row's bytes and the
// lists' addresses. A thread moves one unit, neighbours move neighbours: rows of 16 bytes and more
// are read and written in whole sectors.
//
// Estimate, for a row of R bytes: R over the link one way, and a sector of 32 for its slot towards
// the device; R of device memory, in sectors of 32. At 20 registers and no shared memory a
// multiprocessor has all of its 2048 threads; with 16 bytes in flight each, 132 multiprocessors
// have 4 MiB in flight, where a link of 64 GB/s and 2 us needs 128 KiB: the link is the limit. The
// division of 64 bits a unit, some 100 instructions, would limit units of 16 bytes to 4.5 TB/s and
// units of 1 byte to 280 GB/s.
#include "tessera.cuh"

template <typename V>
__device__ __forceinline__ void gather(const V* plane, const u64* slots, V* to, u64 row_units, u64 units) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 at = thread_of_grid(); at < units; at += step) {
    const u64 row = at / row_units, unit = at - row * row_units;
    to[at] = plane[slots[row] * row_units + unit];
  }
}

template <typename V>
__device__ __forceinline__ void scatter(V* plane, const u64* slots, const V* from, u64 row_units, u64 units) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 at = thread_of_grid(); at < units; at += step) {
    const u64 row = at / row_units, unit = at - row * row_units;
    const u64 slot = slots[row];
    if (slot != ~0ull) plane[slot * row_units + unit] = from[at];
  }
}

extern "C" __global__ void gather_rows_16(const uint4* plane, const u64* slots, uint4* to, u64 row_units, u64 units) {
  gather(plane, slots, to, row_units, units);
}
extern "C" __global__ void gather_rows_8(const u64* plane, const u64* slots, u64* to, u64 row_units, u64 units) {
  gather(plane, slots, to, row_units, units);
}
extern "C" __global__ void gather_rows_4(const u32* plane, const u64* slots, u32* to, u64 row_units, u64 units) {
  gather(plane, slots, to, row_units, units);
}
extern "C" __global__ void gather_rows_2(const u16* plane, const u64* slots, u16* to, u64 row_units, u64 units) {
  gather(plane, slots, to, row_units, units);
}
extern "C" __global__ void gather_rows_1(const u8* plane, const u64* slots, u8* to, u64 row_units, u64 units) {
  gather(plane, slots, to, row_units, units);
}
extern "C" __global__ void scatter_rows_16(uint4* plane, const u64* slots, const uint4* from, u64 row_units, u64 units) {
  scatter(plane, slots, from, row_units, units);
}
extern "C" __global__ void scatter_rows_8(u64* plane, const u64* slots, const u64* from, u64 row_units, u64 units) {
  scatter(plane, slots, from, row_units, units);
}
extern "C" __global__ void scatter_rows_4(u32* plane, const u64* slots, const u32* from, u64 row_units, u64 units) {
  scatter(plane, slots, from, row_units, units);
}
extern "C" __global__ void scatter_rows_2(u16* plane, const u64* slots, const u16* from, u64 row_units, u64 units) {
  scatter(plane, slots, from, row_units, units);
}
extern "C" __global__ void scatter_rows_1(u8* plane, const u64* slots, const u8* from, u64 row_units, u64 units) {
  scatter(plane, slots, from, row_units, units);
}
