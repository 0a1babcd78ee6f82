// What the kernels of embedding tables share: views of tables and of a batch's grouping, numbers as
// tables store them, teams of lanes, sums over columns in the host's order.
//
// Layout of work. A row, or a bag, is a team's: 8, 16 or 32 neighbouring lanes of a warp. A lane has V
// neighbouring columns at a time: 4, in vector loads, where dim, stride and first columns are multiples
// of 4; else 1, in a team of 32. A team takes lanes * V columns at once, and further ones in a loop.
//
// Bits are the host's: every operation is IEEE's in float32, no product is contracted with a sum, and
// sums over columns follow embedding/src/cpu/rules.rs.
#pragma once
#include "tessera.cuh"

namespace embedding {

// ---- views, as src/cuda/views.rs fills them ------------------------------------------------------

// How weights are stored.
enum : u32 { FP32 = 0, FP16 = 1, BF16 = 2 };
// How gradients are clipped.
enum : u32 { CLIP_NONE = 0, CLIP_VALUE = 1, CLIP_SCALE = 2 };
// An index of a list that is not there.
constexpr u64 NONE = ~0ull;

// An optimizer's constants for one step; those that it lacks are 0.
struct Constants {
  float lr, eps, l2, keep, moment_scale;
  float beta1, fresh1, beta2, fresh2, correction1, correction2;
  float decay, momentum, l1, beta, unused;
};

// A table, in the words that a launch brings; `slots`, `rows` and `columns` are indices into these.
struct Table {
  u64 weights, state;            // addresses of the planes
  u64 slots;                     // the slot of each number, or NONE where a slot is the row
  u64 rows;                      // the row of each number, or NONE where it is not numbered
  u64 columns;                   // first columns of its features
  u64 key_base;                  // its rows' keys in the grouping begin here
  u64 reach_first, reach_end;    // rows, or numbers, that the operation may touch
  u64 dim, state_columns;        // numbers a row
  u64 first_row, first_block;    // place in the whole table: row, and columns / 8
  u64 rounding_key;              // generator of the step's rounding
  u64 out;                       // where its rows begin in what is written
  u32 features, precision, lanes, vector, scaled, clip_kind, checks_gradient, unused;
  float clip, whole_dim;
  Constants constants;
};

// A batch's rows and their occurrences: `keys` ascend, a table's after the former's.
struct Runs {
  const u64* keys;         // (runs)
  const u32* starts;       // (runs + 1), into terms
  const u32* terms;        // feature-of-the-table * bags + bag, occurrences in canonical order
  const float* scales;     // like terms; read for tables that are scaled
  const u32* table_runs;   // (tables + 1), first run of each table
  const u32* long_count;   // how many runs are long
  const u32* long_runs;    // (long runs), in any order
  const u32* long_index;   // (runs), a long run's place in long_runs
  float* long_sums;        // (long runs, long_stride), their gradients
  u64 long_stride;
};

// The gradient of the pooled vectors, (bags, stride).
struct Pooled {
  const float* grad;
  u64 stride;
  u64 bags;
};

// Runs of more occurrences are summed beforehand, by blocks of their own.
constexpr u32 LONG_RUN = 256;

// ---- columns of a lane -----------------------------------------------------------------------------

template <int V>
struct Columns {
  float x[V];
};

template <int V>
__device__ __forceinline__ Columns<V> zeros() {
  Columns<V> columns;
#pragma unroll
  for (int k = 0; k < V; ++k) columns.x[k] = 0.0f;
  return columns;
}

template <int V>
__device__ __forceinline__ Columns<V> read(const float* from) {
  Columns<V> columns;
  if constexpr (V == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    columns.x[0] = four.x, columns.x[1] = four.y, columns.x[2] = four.z, columns.x[3] = four.w;
  } else {
    columns.x[0] = *from;
  }
  return columns;
}

template <int V>
__device__ __forceinline__ void write(float* to, const Columns<V>& columns) {
  if constexpr (V == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(columns.x[0], columns.x[1], columns.x[2], columns.x[3]);
  } else {
    *to = columns.x[0];
  }
}

// ---- numbers as tables store them; see embedding/src/cpu/numbers.rs -------------------------------

__device__ __forceinline__ bool finite(float x) {
  return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u;
}

template <int V>
__device__ __forceinline__ bool finite(const Columns<V>& columns) {
  bool all = true;
#pragma unroll
  for (int k = 0; k < V; ++k) all = all && finite(columns.x[k]);
  return all;
}

__device__ __forceinline__ float of_fp16(u32 bits) {
  const u32 sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7FFFu) << 13;
  // Read as binary32 the exponent is 112 too small, for subnormal numbers too.
  const u32 value = __float_as_uint(__uint_as_float(magnitude) * __uint_as_float((127u + 112u) << 23));
  const u32 special = magnitude >= (0x7C00u << 13) ? 0x7F800000u : 0u;
  return __uint_as_float(value | special | sign);
}

__device__ __forceinline__ float of_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// The bits of a neighbour of the finite number x, chosen by 16 random bits.
__device__ __forceinline__ u32 round_fp16(float x, u32 random) {
  const u32 sign = (__float_as_uint(x) >> 16) & 0x8000u, magnitude = __float_as_uint(x) & 0x7FFFFFFFu;
  // From 2^-14 up: 13 bits are dropped, and the exponent's bias falls by 112.
  const int cut = (int)((magnitude + (random & 0x1FFFu)) >> 13) - (112 << 10);
  const u32 normal = (u32)(cut < 0x7C00 ? cut : 0x7C00);
  // Below: multiples of 2^-24. The scaled number and its fraction are exact.
  float scaled = __uint_as_float(magnitude) * 16777216.0f;
  scaled = scaled < 1024.0f ? scaled : 1024.0f;
  const int whole = (int)scaled;
  const int fraction = (int)((scaled - (float)whole) * 65536.0f);
  const int carry = ((int)(random & 0xFFFFu) + fraction) >> 16;
  return sign | (magnitude >= (113u << 23) ? normal : (u32)(whole + carry));
}

__device__ __forceinline__ u32 round_bf16(float x, u32 random) {
  return (__float_as_uint(x) + (random & 0xFFFFu)) >> 16;
}

template <int V>
__device__ __forceinline__ Columns<V> read_weights(u64 plane, u32 precision, u64 at) {
  if (precision == FP32) return read<V>(reinterpret_cast<const float*>(plane) + at);
  const u16* from = reinterpret_cast<const u16*>(plane) + at;
  u32 bits[V];
  if constexpr (V == 4) {
    const ushort4 four = *reinterpret_cast<const ushort4*>(from);
    bits[0] = four.x, bits[1] = four.y, bits[2] = four.z, bits[3] = four.w;
  } else {
    bits[0] = *from;
  }
  Columns<V> columns;
#pragma unroll
  for (int k = 0; k < V; ++k) columns.x[k] = precision == FP16 ? of_fp16(bits[k]) : of_bf16(bits[k]);
  return columns;
}

// Weights as they will be stored.
template <int V>
struct Bits {
  u32 x[V];
};

// Rounds finite weights of columns `column ..` of a row; `fine` becomes false when one overflows.
template <int V>
__device__ __forceinline__ Bits<V> rounded(const Table& table, const Columns<V>& w, u64 row, u64 column, bool& fine) {
  Bits<V> bits;
  if (table.precision == FP32) {
#pragma unroll
    for (int k = 0; k < V; ++k) bits.x[k] = __float_as_uint(w.x[k]);
    return bits;
  }
  // 16 of a block's 128 bits for each of 8 columns.
  const PhiloxBlock random =
      philox(table.rounding_key, table.first_row + row, table.first_block + column / 8);
  const u32 infinity = table.precision == FP16 ? 0x7C00u : 0x7F80u;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const u32 c = (u32)(column % 8) + k;
    // Indexed by constants where V is 4, so that the block stays in registers.
    const u32 word = V == 4 ? random.word[k] : c % 4 < 2 ? (c % 4 == 0 ? random.word[0] : random.word[1])
                                                       : (c % 4 == 2 ? random.word[2] : random.word[3]);
    const u32 part = word >> (c / 4 * 16);
    bits.x[k] = table.precision == FP16 ? round_fp16(w.x[k], part) : round_bf16(w.x[k], part);
    fine = fine && (bits.x[k] & infinity) != infinity;
  }
  return bits;
}

template <int V>
__device__ __forceinline__ void write_weights(const Table& table, u64 at, const Bits<V>& bits) {
  if (table.precision == FP32) {
    u32* to = reinterpret_cast<u32*>(table.weights) + at;
    if constexpr (V == 4) {
      *reinterpret_cast<uint4*>(to) = make_uint4(bits.x[0], bits.x[1], bits.x[2], bits.x[3]);
    } else {
      *to = bits.x[0];
    }
  } else {
    u16* to = reinterpret_cast<u16*>(table.weights) + at;
    if constexpr (V == 4) {
      *reinterpret_cast<ushort4*>(to) =
          make_ushort4((u16)bits.x[0], (u16)bits.x[1], (u16)bits.x[2], (u16)bits.x[3]);
    } else {
      *to = (u16)bits.x[0];
    }
  }
}

// ---- teams --------------------------------------------------------------------------------------------

// Neighbouring lanes of a warp that work on one row or bag.
struct Team {
  u32 mask, lane, lanes;
};

__device__ __forceinline__ Team team_of(u32 lanes) {
  const u32 lane = threadIdx.x % 32, first = lane & ~(lanes - 1);
  const u32 mask = lanes == 32 ? ~0u : ((1u << lanes) - 1) << first;
  return {mask, lane - first, lanes};
}

__device__ __forceinline__ bool all(const Team& team, bool vote) { return __all_sync(team.mask, vote) != 0; }

// Sums of x over blocks of 32 columns: lane l = x[l] + x[l + 8] + x[l + 16] + x[l + 24] in this order,
// then ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). Each block's first lane of the team has its sum; with
// V = 4 a block is 8 lanes.
template <int V, typename T>
__device__ __forceinline__ T block_sum(const Team& team, const T (&x)[V]) {
  if constexpr (V == 4) {
    // An even lane of a block has l = 0..3, an odd one l = 4..7.
    const u32 same = (team.lane & ~7u) | (team.lane & 1u);
    T t[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      T s = x[k];
#pragma unroll
      for (u32 m = 2; m < 8; m += 2) s = s + __shfl_sync(team.mask, x[k], same + m, team.lanes);
      t[k] = s + __shfl_sync(team.mask, s, team.lane | 1u, team.lanes);
    }
    return (t[0] + t[2]) + (t[1] + t[3]);
  } else {
    T s = x[0];
#pragma unroll
    for (u32 m = 8; m < 32; m += 8) s = s + __shfl_sync(team.mask, x[0], (team.lane + m) % 32, 32);
    const T t = s + __shfl_sync(team.mask, s, (team.lane + 4) % 32, 32);
    const T u = t + __shfl_sync(team.mask, t, (team.lane + 2) % 32, 32);
    return u + __shfl_sync(team.mask, u, (team.lane + 1) % 32, 32);
  }
}

// `total` and the sums of the blocks that the team has at hand, in their order. Columns beyond the
// row's are zeros, and add nothing to what is never negative.
template <int V, typename T>
__device__ __forceinline__ T add_blocks(const Team& team, T total, const T (&x)[V]) {
  const T sum = block_sum<V>(team, x);
  const u32 lanes_a_block = 32 / V;
  for (u32 lane = 0; lane < team.lanes; lane += lanes_a_block)
    total = total + __shfl_sync(team.mask, sum, lane, team.lanes);
  return total;
}

// ---- gradients of rows ----------------------------------------------------------------------------------

// Terms of a run whose loads are under way at a time.
constexpr u32 TERMS_AHEAD = 4;

// A term's pooled gradient.
__device__ __forceinline__ const float* term_at(const Table& table, const u64* words, const Pooled& pooled, u32 term) {
  if (table.features == 1) return pooled.grad + term * pooled.stride + words[table.columns];
  const u32 bags = (u32)pooled.bags, feature = term / bags, bag = term - feature * bags;
  return pooled.grad + bag * pooled.stride + words[table.columns + feature];
}

// The summed gradient of a run in columns `column ..`, from the first term on, in canonical order.
template <int V>
__device__ __forceinline__ Columns<V> gradient(const Table& table, const u64* words, const Runs& runs,
                                               const Pooled& pooled, u32 run, u64 column) {
  const u32 low = runs.starts[run], high = runs.starts[run + 1];
  if (high - low > LONG_RUN)
    return read<V>(runs.long_sums + runs.long_index[run] * runs.long_stride + column);
  Columns<V> sum = zeros<V>();
  for (u32 at = low; at < high; at += TERMS_AHEAD) {
    Columns<V> terms[TERMS_AHEAD];
#pragma unroll
    for (u32 i = 0; i < TERMS_AHEAD; ++i) {
      terms[i] = zeros<V>();
      if (at + i >= high) continue;
      terms[i] = read<V>(term_at(table, words, pooled, runs.terms[at + i]) + column);
      if (table.scaled) {
        const float scale = runs.scales[at + i];
#pragma unroll
        for (int k = 0; k < V; ++k) terms[i].x[k] = terms[i].x[k] * scale;
      }
    }
#pragma unroll
    for (u32 i = 0; i < TERMS_AHEAD; ++i) {
      if (at + i >= high) continue;
#pragma unroll
      for (int k = 0; k < V; ++k)
        sum.x[k] = at + i == low ? terms[i].x[k] : sum.x[k] + terms[i].x[k];
    }
  }
  return sum;
}

// As the host's vector instructions: the second number where they do not compare.
__device__ __forceinline__ float smaller(float a, float b) { return a < b ? a : b; }
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

template <int V>
__device__ __forceinline__ void clip(const Table& table, Columns<V>& g) {
  if (table.clip_kind == CLIP_NONE) return;
#pragma unroll
  for (int k = 0; k < V; ++k)
    g.x[k] = table.clip_kind == CLIP_VALUE ? smaller(larger(g.x[k], -table.clip), table.clip) : g.x[k] * table.clip;
}

// A block's copy of a table's view: all of its threads read it all the time.
__device__ __forceinline__ void bring(Table& to, const Table* from) {
  const u32 words = sizeof(Table) / sizeof(u64);
  for (u32 i = threadIdx.x; i < words; i += blockDim.x)
    reinterpret_cast<u64*>(&to)[i] = reinterpret_cast<const u64*>(from)[i];
  __syncthreads();
}

}  // namespace embedding
