// Pooled lookup of all features of a batch in one launch, and first weights of rows.
//
//   pooled_lookup   a team a bag: out[bag][column ..] = sum of its rows, from the first on
//
// Bytes a bag: ids * (row + 8, or 16 where slots are looked up) + 16 for offsets read, dim * 4
// written. At one id and dim 128 in float32 that is 536 read and 512 written: the rows alone are 96%.
// Occupancy: blocks of 256 threads, 64 registers, no shared memory: 4 blocks, 32 warps, a
// multiprocessor, each with up to 4 rows of 512 bytes on their way: 64 KiB in flight, twice what
// latency times bandwidth asks for with bags of several ids. With one id a bag it is 16 KiB, and a bag
// takes the latencies of its id and of its row one after the other; its offsets were read ahead.
//
//   init_uniform    a thread 4 columns: dim * bytes written a row; 60 integer instructions a block of
//                   the generator, which is the limit
#include "embedding.cuh"

namespace embedding {

// Bags of one feature and the table that they look up.
struct Feature {
  u64 weights;         // address of the plane
  u64 slots;           // index into the words, or NONE
  const u64* offsets;  // (bags + 1), counted from the feature's first id
  u64 first_id;        // among the ids of all features
  u64 dim, column;
  u32 precision, lanes, vector, mean, weighted, unused;
};

// Rows of a bag that are on their way at a time.
constexpr u32 IDS_AHEAD = 4;

template <int V>
__device__ __forceinline__ void pool(const Feature& feature, const Team& team, const u64* ids, const u64* slots,
                                     const float* weights, u64 low, u64 high, float* out) {
  const float count = (float)(high - low);
  for (u64 column = team.lane * V; column < feature.dim; column += team.lanes * V) {
    Columns<V> sum = zeros<V>();
    for (u64 at = low; at < high; at += IDS_AHEAD) {
      Columns<V> terms[IDS_AHEAD];
#pragma unroll
      for (u32 i = 0; i < IDS_AHEAD; ++i) {
        terms[i] = zeros<V>();
        if (at + i >= high) continue;
        const u64 id = ids[at + i], slot = slots ? slots[id] : id;
        terms[i] = read_weights<V>(feature.weights, feature.precision, slot * feature.dim + column);
        if (feature.weighted) {
          const float weight = weights[at + i];
#pragma unroll
          for (int k = 0; k < V; ++k) terms[i].x[k] = terms[i].x[k] * weight;
        }
      }
#pragma unroll
      for (u32 i = 0; i < IDS_AHEAD; ++i) {
        if (at + i >= high) continue;
#pragma unroll
        for (int k = 0; k < V; ++k)
          sum.x[k] = at + i == low ? terms[i].x[k] : sum.x[k] + terms[i].x[k];
      }
    }
    if (feature.mean && low < high) {
#pragma unroll
      for (int k = 0; k < V; ++k) sum.x[k] = sum.x[k] / count;
    }
    write<V>(out + column, sum);
  }
}

// To the nearest, ties to even, as the host writes first weights of 16 bits. x is finite.
__device__ __forceinline__ u32 nearest_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

__device__ __forceinline__ u32 nearest_fp16(float x) {
  const u32 sign = (__float_as_uint(x) >> 16) & 0x8000u, magnitude = __float_as_uint(x) & 0x7FFFFFFFu;
  if (magnitude >= (113u << 23)) {
    const u32 even = (magnitude + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
    const u32 normal = even - (112u << 10);
    return sign | (normal < 0x7C00u ? normal : 0x7C00u);
  }
  // Multiples of 2^-24: adding 2^-1, whose last bit is 2^-24, rounds.
  const float shifted = __uint_as_float(magnitude) + 0.5f;
  return sign | (__float_as_uint(shifted) - __float_as_uint(0.5f));
}

}  // namespace embedding

using namespace embedding;

// `blocks` blocks for each feature; bags first .. end. out is (bags, stride).
extern "C" __global__ void __launch_bounds__(256, 3)
    pooled_lookup(const Feature* features, const u64* words, u32 blocks, u64 first, u64 end, const u64* ids,
                  const float* weights, float* out, u64 stride) {
  const Feature feature = features[blockIdx.x / blocks];
  const Team team = team_of(feature.lanes);
  const u64* slots = feature.slots == NONE ? nullptr : words + feature.slots;
  const u64 teams = blockDim.x / feature.lanes;
  const u64 step = blocks * teams;
  u64 bag = first + blockIdx.x % blocks * teams + threadIdx.x / feature.lanes;
  u64 low = 0, high = 0;
  if (bag < end) low = feature.offsets[bag], high = feature.offsets[bag + 1];
  while (bag < end) {
    // The next bag's, so that they are here when this one is done.
    const u64 next = bag + step;
    u64 next_low = 0, next_high = 0;
    if (next < end) next_low = feature.offsets[next], next_high = feature.offsets[next + 1];
    float* to = out + bag * stride + feature.column;
    const u64 from = feature.first_id;
    if (feature.vector) pool<4>(feature, team, ids, slots, weights, from + low, from + high, to);
    else pool<1>(feature, team, ids, slots, weights, from + low, from + high, to);
    bag = next, low = next_low, high = next_high;
  }
}

// First weights of `rows` rows, uniform on [-scale, scale): words of block (row, column / 4) of the
// table's generator. `row` and `block` are the plane's place in the whole table.
extern "C" __global__ void __launch_bounds__(256)
    init_uniform(u64 key, float scale, u64 rows, u64 dim, u64 row, u64 block, u32 precision, u8* plane) {
  const u64 blocks = (dim + 3) / 4, step = (u64)gridDim.x * blockDim.x;
  for (u64 i = thread_of_grid(); i < rows * blocks; i += step) {
    const u64 r = i / blocks, b = i - r * blocks;
    const PhiloxBlock random = philox(key, row + r, block + b);
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      if (b * 4 + k >= dim) continue;
      const float unit = (float)(random.word[k] >> 8) * (1.0f / 16777216.0f);
      const float x = (2.0f * unit - 1.0f) * scale;
      const u64 at = r * dim + b * 4 + k;
      if (precision == FP32) reinterpret_cast<float*>(plane)[at] = x;
      else reinterpret_cast<u16*>(plane)[at] = (u16)(precision == FP16 ? nearest_fp16(x) : nearest_bf16(x));
    }
  }
}
