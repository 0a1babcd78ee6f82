// Dense optimizers, an element a thread, with the host's operations and bits: see `DenseOptimizer`.
//
// Bytes an element: 12 for sgd, 20 for adagrad, 28 for adam; at most 13 flops, with a division and a
// root or three: the memory is the limit, at 2048 threads a multiprocessor (32 registers). 5 million
// elements of adam take 30 microseconds of an H200.
#include "tessera.cuh"

enum : u32 { CLIP_NONE = 0, CLIP_VALUE = 1, CLIP_SCALE = 2 };

__device__ __forceinline__ float clipped(float g, u32 clip, float by) {
  if (clip == CLIP_VALUE) return g > by ? by : g < -by ? -by : g;  // NaN stays NaN
  return clip == CLIP_SCALE ? g * by : g;
}

// a / b, 0 where b is 0: a zero gradient without eps moves nothing.
__device__ __forceinline__ float quotient(float a, float b) { return b == 0.0f ? 0.0f : a / b; }

extern "C" __global__ void __launch_bounds__(256) dense_sgd(const float* grads, float* weights, float lr, u32 clip, float by, u64 n) {
  const u64 i = thread_of_grid();
  if (i < n) weights[i] -= lr * clipped(grads[i], clip, by);
}

extern "C" __global__ void __launch_bounds__(256)
    dense_adagrad(const float* grads, float* weights, float* sums, float lr, float eps, u32 clip, float by, u64 n) {
  const u64 i = thread_of_grid();
  if (i >= n) return;
  const float g = clipped(grads[i], clip, by);
  const float sum = sums[i] + g * g;
  sums[i] = sum;
  weights[i] -= quotient(lr * g, sqrtf(sum) + eps);
}

// Must be as `cuda/update.rs` has it.
struct DenseAdamRule {
  float eps, beta1, rest1, correction1, beta2, rest2, correction2;
};

extern "C" __global__ void __launch_bounds__(256)
    dense_adam(const float* grads, float* weights, float* means, float* squares, DenseAdamRule rule, float lr, u32 clip, float by,
         u64 n) {
  const u64 i = thread_of_grid();
  if (i >= n) return;
  const float g = clipped(grads[i], clip, by);
  const float m = rule.beta1 * means[i] + rule.rest1 * g;
  const float v = rule.beta2 * squares[i] + rule.rest2 * (g * g);
  means[i] = m;
  squares[i] = v;
  const float mean = m / rule.correction1;
  const float root = sqrtf(v / rule.correction2);
  weights[i] -= quotient(lr * mean, root + rule.eps);
}
