// Kernels that the tests of tessera-device launch: small, each for one thing that must hold.
#include "tessera.cuh"

// out[i] = start + i, for n elements.
extern "C" __global__ void count_up(u32* out, u32 start, u64 n) {
  const u64 i = thread_of_grid();
  if (i < n) out[i] = start + (u32)i;
}

// out[i] = in[i] + add, for n elements.
extern "C" __global__ void add_to_each(const u32* in, u32* out, u32 add, u64 n) {
  const u64 i = thread_of_grid();
  if (i < n) out[i] = in[i] + add;
}

// Sum of n words, by one block: a tree over shared memory of a word a thread.
extern "C" __global__ void sum_of_block(const u32* in, u64* out, u64 n) {
  DYNAMIC_SHARED(u64, part);
  u64 sum = 0;
  for (u64 i = threadIdx.x; i < n; i += blockDim.x) sum += in[i];
  part[threadIdx.x] = sum;
  __syncthreads();
  for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) *out = part[0];
}

// Four words of the generator a thread.
extern "C" __global__ void philox_words(u64 key, u64 high, u32* out, u64 n) {
  const u64 i = thread_of_grid();
  if (i >= n) return;
  const PhiloxBlock block = philox(key, i, high);
  for (int k = 0; k < 4; ++k) out[i * 4 + k] = block.word[k];
}

struct ThreeNumbers {
  u64 a;
  u32 b, c;
};
// A struct by value, and launch bounds.
extern "C" __global__ void __launch_bounds__(32) write_three(ThreeNumbers three, u64* out) {
  if (threadIdx.x == 0) {
    out[0] = three.a;
    out[1] = three.b;
    out[2] = three.c;
  }
}

// What float arithmetic must be like: products and sums apart, subnormal numbers, exact division
// and root. out has 4 floats.
extern "C" __global__ void arithmetic(float a, float b, float c, float tiny, float* out) {
  out[0] = a * b + c;
  out[1] = tiny * 0.5f;
  out[2] = a / b;
  out[3] = sqrtf(a);
}
