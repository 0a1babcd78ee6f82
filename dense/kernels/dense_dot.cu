// Dot interaction: products of all pairs of a sample's vectors, and their gradient. A block of 128
// threads has a sample at a time, whose vectors lie in shared memory, columns `depth` at once.
//
//   forward   a thread a pair (i, j), j < i: a chain of products over d
//   backward  a thread an element (i, d): a chain over j of s_ij z_j[d], s_ii = 0
//
// The chains are the host's, so the bits are too. Rows in shared memory are an odd number of words
// apart: threads of a warp have neighbours j, or neighbours d, hence different banks.
//
// For 27 vectors of 128: a sample moves 15 KiB forward and 29 KiB back, and 1.5 kB of products;
// 90 k and 187 k flops. 13.9 KiB of shared memory a block: 16 blocks, 2048 threads (32 registers), a
// multiprocessor. What limits is shared memory: two words a product forward, one and one of the
// first cache backward, 2.9 k and 5.8 k cycles a sample and multiprocessor, 80 and 38 million samples
// a second on an H200; its memory would allow 300 and 150 million.
#include "tessera.cuh"

__device__ __forceinline__ u64 pair_row(u64 i) { return i * (i - 1) / 2; }

// Columns first..first + depth of all vectors, into rows `pitch` apart.
__device__ __forceinline__ void load(const float* x, u32 vectors, u64 dim, u64 first, u32 depth, u32 pitch, float* z) {
  u32 v = threadIdx.x / depth, d = threadIdx.x % depth;
  const u32 rows = blockDim.x / depth, rest = blockDim.x % depth;
  while (v < vectors) {
    z[(u64)v * pitch + d] = x[v * dim + first + d];
    v += rows;
    d += rest;
    if (d >= depth) {
      d -= depth;
      ++v;
    }
  }
}

// y = the first `copied` columns of x, then the pairs (1,0), (2,0), (2,1), (3,0)...
extern "C" __global__ void __launch_bounds__(128)
    dense_dot(const float* x, u64 x_stride, u32 vectors, u64 dim, u64 copied, u32 depth, float* y, u64 y_stride, u64 batch) {
  DYNAMIC_SHARED(float, z);
  const u32 pitch = depth | 1;
  for (u64 sample = blockIdx.x; sample < batch; sample += gridDim.x) {
    const float* from = x + sample * x_stride;
    float* to = y + sample * y_stride;
    for (u64 c = threadIdx.x; c < copied; c += blockDim.x) to[c] = from[c];
    for (u64 first = 0; first < dim; first += depth) {
      const u32 here = dim - first < depth ? (u32)(dim - first) : depth;
      load(from, vectors, dim, first, here, pitch, z);
      __syncthreads();
      u32 i = 1, j = threadIdx.x;
      while (i < vectors) {
        if (j >= i) {
          j -= i++;
          continue;
        }
        const float *left = z + (u64)i * pitch, *right = z + (u64)j * pitch;
        float* pair = to + copied + pair_row(i) + j;
        float sum = first == 0 ? 0.0f : *pair;
#pragma unroll 8
        for (u32 d = 0; d < here; ++d) sum += left[d] * right[d];
        *pair = sum;
        j += blockDim.x;
      }
      __syncthreads();
    }
  }
}

// dx_i = sum_j s_ij z_j, plus the copied columns' gradient for the first vector.
extern "C" __global__ void __launch_bounds__(128)
    dense_dot_grad(const float* x, u64 x_stride, const float* dy, u64 dy_stride, u32 vectors, u64 dim, u64 copied, u32 depth,
             float* dx, u64 dx_stride, u64 batch) {
  DYNAMIC_SHARED(float, z);
  const u32 pitch = depth | 1;
  for (u64 sample = blockIdx.x; sample < batch; sample += gridDim.x) {
    const float *from = x + sample * x_stride, *grads = dy + sample * dy_stride, *pairs = grads + copied;
    float* to = dx + sample * dx_stride;
    for (u64 first = 0; first < dim; first += depth) {
      const u32 here = dim - first < depth ? (u32)(dim - first) : depth;
      load(from, vectors, dim, first, here, pitch, z);
      __syncthreads();
      u32 i = threadIdx.x / here, d = threadIdx.x % here;
      const u32 rows = blockDim.x / here, rest = blockDim.x % here;
      while (i < vectors) {
        const u64 column = i * dim + first + d;
        float sum = column < copied ? grads[column] : 0.0f;
        const float* row = pairs + pair_row(i);
#pragma unroll 4
        for (u32 j = 0; j < i; ++j) sum += row[j] * z[(u64)j * pitch + d];
        sum += 0.0f * z[(u64)i * pitch + d];
#pragma unroll 4
        for (u32 j = i + 1; j < vectors; ++j) sum += pairs[pair_row(j) + i] * z[(u64)j * pitch + d];
        to[column] = sum;
        i += rows;
        d += rest;
        if (d >= here) {
          d -= here;
          ++i;
        }
      }
      __syncthreads();
    }
  }
}
