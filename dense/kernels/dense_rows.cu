// Passes over rows of matrices that need no sum: what follows a linear layer, gates, copies, the
// cross layer's products. The host's bits, as each element is computed by the host's operations.
//
// A block has 32 columns and 8 rows; a warp reads 128 bytes of a row at once, and a thread goes on
// to the row that lies one grid further down. No index is ever divided.
//
// Bytes an element (4 an f32), 1 to 5 flops: the memory is the limit, 2048 threads a multiprocessor
// (at most 32 registers) keep 24 KiB of it under way.
//   finish_linear  8    gate  12    copy_rows  8    cross  16    cross_grad  16 to 20
//   add_columns, spread_column  4 a wide column
#include "tessera.cuh"

// Calls cell(r, c) for all cells of a matrix.
template <class Cell>
__device__ __forceinline__ void for_cells(u64 rows, u64 cols, Cell cell) {
  const u64 c = thread_of_grid();
  if (c >= cols) return;
  const u64 step = (u64)gridDim.y * blockDim.y;
  for (u64 r = (u64)blockIdx.y * blockDim.y + threadIdx.y; r < rows; r += step) cell(r, c);
}

// y += bias, if there is one; then y = max(0, y) with `relu`, where NaN stays NaN.
extern "C" __global__ void __launch_bounds__(256)
    dense_finish_linear(float* y, u64 y_stride, const float* bias, u32 relu, u64 rows, u64 cols) {
  for_cells(rows, cols, [&](u64 r, u64 c) {
    float value = y[r * y_stride + c];
    if (bias) value += bias[c];
    if (relu && value < 0.0f) value = 0.0f;
    y[r * y_stride + c] = value;
  });
}

// dy = 0 where y, a ReLU's output, is 0.
extern "C" __global__ void __launch_bounds__(256)
    dense_gate(const float* y, u64 y_stride, float* dy, u64 dy_stride, u64 rows, u64 cols) {
  for_cells(rows, cols, [&](u64 r, u64 c) {
    if (y[r * y_stride + c] <= 0.0f) dy[r * dy_stride + c] = 0.0f;
  });
}

extern "C" __global__ void __launch_bounds__(256)
    dense_copy_rows(const float* from, u64 from_stride, float* to, u64 to_stride, u64 rows, u64 cols) {
  for_cells(rows, cols, [&](u64 r, u64 c) { to[r * to_stride + c] = from[r * from_stride + c]; });
}

// y = x0 * u + x.
extern "C" __global__ void __launch_bounds__(256)
    dense_cross(const float* x0, u64 x0_stride, const float* u, u64 u_stride, const float* x, u64 x_stride, float* y,
          u64 y_stride, u64 rows, u64 cols) {
  for_cells(rows, cols, [&](u64 r, u64 c) {
    y[r * y_stride + c] = x0[r * x0_stride + c] * u[r * u_stride + c] + x[r * x_stride + c];
  });
}

// du = dy * x0; dx0 = dy * u, plus dx0 unless `last`, plus dy if `first`.
extern "C" __global__ void __launch_bounds__(256)
    dense_cross_grad(const float* dy, u64 dy_stride, const float* x0, u64 x0_stride, const float* u, u64 u_stride, float* du,
               u64 du_stride, float* dx0, u64 dx0_stride, u32 first, u32 last, u64 rows, u64 cols) {
  for_cells(rows, cols, [&](u64 r, u64 c) {
    const float g = dy[r * dy_stride + c];
    float* sum = dx0 + r * dx0_stride + c;
    const float before = last ? 0.0f : *sum;
    const float through = first ? g : 0.0f;
    du[r * du_stride + c] = g * x0[r * x0_stride + c];
    *sum = (before + g * u[r * u_stride + c]) + through;
  });
}

// y += x_0 + x_1 + ..., one column after the other, by a thread a row.
extern "C" __global__ void __launch_bounds__(256)
    dense_add_columns(const float* x, u64 x_stride, float* y, u64 y_stride, u64 rows, u64 cols) {
  const u64 r = thread_of_grid();
  if (r >= rows) return;
  float sum = y[r * y_stride];
  for (u64 c = 0; c < cols; ++c) sum += x[r * x_stride + c];
  y[r * y_stride] = sum;
}

// Each column of dx becomes dy.
extern "C" __global__ void __launch_bounds__(256)
    dense_spread_column(const float* dy, u64 dy_stride, float* dx, u64 dx_stride, u64 rows, u64 cols) {
  for_cells(rows, cols, [&](u64 r, u64 c) { dx[r * dx_stride + c] = dy[r * dy_stride]; });
}
