// Sums of squares in f64, in the order that `DenseOps::sums_of_squares` promises, and sums of what
// blocks left behind; so the host's bits.
//
//   squares         8 threads a block of 8192 elements, a warp for four; thread l adds elements l,
//                   l + 8, ..., then ((0+4)+(2+6))+((1+5)+(3+7))
//   add_in_order    a thread a range adds its blocks' sums, one after the other
//
// 4 bytes and 2 f64 flops an element. A thread's additions are a chain of 1024, about 40
// microseconds whatever the size up to 270 million elements (132 multiprocessors, 2048 threads): the
// latency is the limit, far below the launches that are saved by having all ranges in one.
#include "tessera.cuh"

// Must be as `cuda/sums.rs` has it.
struct DenseSumRanges {
  u64 begin[64];        // elements
  u64 end[64];
  u64 first_block[65];  // among the blocks of all ranges
  u64 count;
};

extern "C" __global__ void __launch_bounds__(128) dense_squares(DenseSumRanges ranges, const float* x, double* sums) {
  const u64 BLOCK = 8192;
  const u64 block = thread_of_grid() / 8;
  const u32 lane = threadIdx.x % 8;
  const bool mine = block < ranges.first_block[ranges.count];
  double sum = 0.0;
  if (mine) {
    u32 range = 0;
    while (block >= ranges.first_block[range + 1]) ++range;
    const u64 begin = ranges.begin[range] + (block - ranges.first_block[range]) * BLOCK;
    const u64 end = begin + BLOCK < ranges.end[range] ? begin + BLOCK : ranges.end[range];
#pragma unroll 8
    for (u64 i = begin + lane; i < end; i += 8) {
      const double value = x[i];
      sum += value * value;
    }
  }
  for (u32 other = 4; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  if (mine && lane == 0) sums[block] = sum;
}

// Sums of blocks, in order, to the places of the first ones.
extern "C" __global__ void __launch_bounds__(64) dense_add_in_order(DenseSumRanges ranges, double* sums) {
  const u32 range = threadIdx.x;
  double sum = 0.0;
  if (range < ranges.count) {
#pragma unroll 8
    for (u64 block = ranges.first_block[range]; block < ranges.first_block[range + 1]; ++block) sum += sums[block];
  }
  __syncthreads();  // all were read
  if (range < ranges.count) sums[range] = sum;
}
