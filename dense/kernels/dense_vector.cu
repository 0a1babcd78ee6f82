// Products with a single row or column, and sums of columns, in an order that depends on shapes
// alone: that of the host's `cpu/vector.rs`, so the host's bits.
//
//   dots              a warp a result; lane l adds elements l, l + 32, ... in order, then lanes l
//                     and l + 16 are added, l and l + 8, 4, 2, 1
//   column_dots       the same order along a column: 32 threads a column, over shared memory
//   weighted_columns  sums of 128 rows, each in order, then these sums in order
//
// Every factor is read once: 4 bytes for 2 flops, so the memory is the limit. dots: 8 warps a block,
// at most 32 registers, 2048 threads a multiprocessor. The other two: 1024 threads and 4.1 KiB of
// shared memory a block of 32 columns, two blocks a multiprocessor (one on sm_100, whose compiler
// takes 43 registers). A matrix of few columns has few blocks, 8 for 256 columns, each with 4 rows
// of every thread under way: latency is the limit there, and 65,536 x 256 take an estimated 0.1 ms
// of a step of 16 ms.
#include "tessera.cuh"

// What happens to what is there.
enum : u32 { STORE = 0, ADD = 1, GATE = 2 };

__device__ __forceinline__ void put(float* out, u64 at, float value, u32 store, const float* gate, u64 gate_at) {
  if (store == ADD) value = out[at] + value;
  if (store == GATE && gate[gate_at] <= 0.0f) value = 0.0f;
  out[at] = value;
}

// out_i = a_i . b_i for `count` pairs of k elements; then as dense_finish_linear of dense_rows.cu. A
// step of 0 is one vector for all.
extern "C" __global__ void __launch_bounds__(256)
    dense_dots(const float* a, u64 a_step, const float* b, u64 b_step, u64 k, const float* bias, u64 bias_step, u32 relu,
         u32 store, const float* gate, u64 gate_step, float* out, u64 out_step, u64 count) {
  const u32 lane = threadIdx.x;
  const u64 step = (u64)gridDim.x * blockDim.y;
  for (u64 i = (u64)blockIdx.x * blockDim.y + threadIdx.y; i < count; i += step) {
    const float *left = a + i * a_step, *right = b + i * b_step;
    float sum = 0.0f;
#pragma unroll 8
    for (u64 e = lane; e < k; e += 32) sum += left[e] * right[e];
    for (u32 half = 16; half > 0; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
    if (lane == 0) {
      if (bias) sum += bias[i * bias_step];
      if (relu && sum < 0.0f) sum = 0.0f;
      put(out, i * out_step, sum, store, gate, i * gate_step);
    }
  }
}

// out_c = sum_r x_rc weight_r, or the column's sum without weights; plus what is there with `add`.
extern "C" __global__ void __launch_bounds__(1024)
    dense_column_dots(const float* x, u64 x_stride, const float* weights, u64 weight_step, u32 add, float* out, u64 rows,
                u64 cols) {
  __shared__ float lanes[32][33];
  const u32 lane = threadIdx.y;
  const u64 c = thread_of_grid();
  float sum = 0.0f;
  if (c < cols) {
    if (weights) {
#pragma unroll 4
      for (u64 r = lane; r < rows; r += 32) sum += x[r * x_stride + c] * weights[r * weight_step];
    } else {
#pragma unroll 4
      for (u64 r = lane; r < rows; r += 32) sum += x[r * x_stride + c];
    }
  }
  lanes[lane][threadIdx.x] = sum;
  __syncthreads();
  for (u32 half = 16; half > 0; half /= 2) {
    if (lane < half) lanes[lane][threadIdx.x] += lanes[lane + half][threadIdx.x];
    __syncthreads();
  }
  if (lane == 0 && c < cols) put(out, c, lanes[0][threadIdx.x], add ? ADD : STORE, nullptr, 0);
}

// out_c = sum_r weight_r x_rc. Without rows, zeros.
extern "C" __global__ void __launch_bounds__(1024)
    dense_weighted_columns(const float* x, u64 x_stride, const float* weights, u64 weight_step, u32 store, const float* gate,
                     float* out, u64 rows, u64 cols) {
  const u64 BLOCK = 128;
  __shared__ float parts[32][33];
  const u64 c = thread_of_grid();
  float total = 0.0f;
  for (u64 first = 0; first < rows; first += 32 * BLOCK) {
    const u64 begin = first + threadIdx.y * BLOCK;
    const u64 end = begin + BLOCK < rows ? begin + BLOCK : rows;
    float part = 0.0f;
    if (c < cols) {
#pragma unroll 4
      for (u64 r = begin; r < end; ++r) part += weights[r * weight_step] * x[r * x_stride + c];
    }
    parts[threadIdx.y][threadIdx.x] = part;
    __syncthreads();
    if (threadIdx.y == 0)
      for (u32 y = 0; y < 32 && first + y * BLOCK < rows; ++y) total += parts[y][threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.y == 0 && c < cols) put(out, c, total, store, gate, c);
}
