// Losses of samples and their gradients, in f64 from the f32 logit; see `cpu/loss.rs`. A block has
// the 256 samples whose losses are added in one block, in order, by one thread.
//
// 16 bytes and an exponential, a logarithm and two divisions in f64 a sample (about 150 flops), 38
// registers: 65,536 samples are 256 blocks, two a multiprocessor, and take less time than the
// launch.
#include "tessera.cuh"

enum : u32 { BCE = 0, MSE = 1 };

extern "C" __global__ void __launch_bounds__(256)
    dense_losses(u32 loss, const float* logits, const float* labels, const float* weights, double rows, float* dlogits,
           double* sums, u64 batch) {
  __shared__ double terms[256];
  const u64 i = thread_of_grid();
  if (i < batch) {
    const double z = logits[i], y = labels[i], weight = weights[i];
    // exp(-|z|) never overflows.
    const double small = exp(-fabs(z));
    const double p = z >= 0.0 ? 1.0 / (1.0 + small) : small / (1.0 + small);
    double value, slope;
    if (loss == BCE) {
      value = (z > 0.0 ? z : 0.0) - z * y + log1p(small);
      slope = p - y;
    } else {
      value = (p - y) * (p - y);
      slope = 2.0 * (p - y) * p * (1.0 - p);
    }
    terms[threadIdx.x] = weight * value;
    dlogits[i] = (float)(weight * slope / rows);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const u64 first = (u64)blockIdx.x * blockDim.x;
    const u32 count = batch - first < blockDim.x ? (u32)(batch - first) : blockDim.x;
    double sum = 0.0;
    for (u32 k = 0; k < count; ++k) sum += terms[k];
    sums[blockIdx.x] = sum;
  }
}
