// Backward pass and optimizer in one launch for all tables that share a rule: one team sums a row's
// gradient and moves the row. Also what is asked of gradients alone: the sums themselves, sums of
// squares over blocks of columns, norms.
//
//   for each run of the table in reach:
//     g = sum of its terms; not finite -> count, leave the row
//     clip; sums over columns that the rule needs; new weights and states
//     anything not finite, or an overflow of 16 bits -> count, leave the row; else write all of it
//
// Bytes a row of L occurrences: L * (4 dim + 4, or 8 with scales) + 12 read for the gradient, weights and
// states read and written once: at L = 1, dim 128 and row-wise AdaGrad in float32 that is 528 + 1032
// = 1.6 KiB. Occupancy: blocks of 256 threads, 64 registers, 80 in the largest rule (LAMB), none
// spilled: 4 blocks, 32 warps, a multiprocessor, or 3, each with 4 terms of 512 bytes and a row on
// their way; memory is the limit. The launch bound of 3 blocks is what keeps registers from spilling. Rows
// wider than a team takes at once keep their gradient in shared memory, 4 dim bytes a team, and read
// weights and states again, from the first-level cache, where a sum over columns or the check of the
// whole row comes before the write.
//
// A run of more than LONG_RUN terms, a row that every sample has, is summed beforehand by a block for
// each 32 of its columns (long_sums): terms come through shared memory 128 at a time, while one warp
// adds the former 128 in order. A term takes the longer of an addition, 4 cycles, and its part of the
// loads, about 6 ns: L terms take 6 L ns, 0.4 ms for 64 K, and no run holds up another. The order of
// additions is the host's, so that nothing may be split further.
#include "embedding.cuh"

namespace embedding {

// What a launch over tables works on: `blocks` blocks for each table of `list`.
struct Work {
  const u64* words;     // lists that the tables' views have indices into
  const Table* tables;  // all tables
  const u32* list;      // those of this launch
  Runs runs;
  Pooled pooled;
  float* wide;          // where gradients of wide rows lie, (warps, wide_stride), or null: shared memory
  u64 wide_stride;
  u32 blocks, unused;
};

__device__ __forceinline__ float quotient(float a, float b) { return b == 0.0f ? 0.0f : a / b; }

// ---- rules; see embedding/src/cpu/rules.rs -----------------------------------------------------------------

// Which sums over columns a rule needs, and which states are one number a row.
enum : u32 { NO_SUM = 0, SQUARES = 1, NORMS = 2 };
enum : u32 { NO_STATE = 0, ONE_NUMBER = 1, ALL_COLUMNS = 2 };

// A rule has A and B, its states' widths; SUMS; `begin`, given the mean square of the gradient and the
// state of one number, which it moves; `direction` of a column, whose norm goes to `end` with that of
// the weights; `move` of a column.
struct Rule {
  Constants c;
  float one = 0.0f;  // the state of one number
  __device__ void begin(float mean_square) {}
  __device__ float direction(float g, float w, float a, float b) const { return g; }
  __device__ void end(float norm_w, float norm_d) {}
};

struct Sgd : Rule {
  static constexpr u32 A = NO_STATE, B = NO_STATE, SUMS = NO_SUM;
  __device__ void move(float g, float& w, float& a, float& b) const { w = w - c.lr * g; }
};

struct Adagrad : Rule {
  static constexpr u32 A = ALL_COLUMNS, B = NO_STATE, SUMS = NO_SUM;
  __device__ void move(float g, float& w, float& a, float& b) const {
    const float x = g + c.l2 * w;
    a = a + x * x;
    w = w * c.keep - quotient(c.lr * x, sqrtf(a) + c.eps);
  }
};

struct RowwiseAdagrad : Rule {
  static constexpr u32 A = ONE_NUMBER, B = NO_STATE, SUMS = SQUARES;
  float m = 0.0f, keep = 0.0f;
  __device__ void begin(float mean_square) {
    one = one + mean_square;
    m = quotient(c.lr, sqrtf(one / c.moment_scale) + c.eps);
    keep = c.l2 == 0.0f ? c.keep : 1.0f - m * c.l2;
  }
  __device__ void move(float g, float& w, float& a, float& b) const { w = keep * w - m * g; }
};

// Adam and LAMB; ROWWISE with one second moment a row, TRUST with the ratio of norms.
template <bool ROWWISE, bool TRUST>
struct AdamKind : Rule {
  static constexpr u32 A = ALL_COLUMNS, B = ROWWISE ? ONE_NUMBER : ALL_COLUMNS;
  static constexpr u32 SUMS = (ROWWISE ? SQUARES : 0u) | (TRUST ? NORMS : 0u);
  float root = 0.0f, ratio = 1.0f;
  __device__ void begin(float mean_square) {
    one = c.beta2 * one + c.fresh2 * mean_square;
    root = sqrtf(one / c.correction2) + c.eps;
  }
  // Moves the moments of a column; gives its direction.
  __device__ float step(float g, float w, float& m, float& v) const {
    m = c.beta1 * m + c.fresh1 * g;
    float below = root;
    if (!ROWWISE) {
      v = c.beta2 * v + c.fresh2 * (g * g);
      below = sqrtf(v / c.correction2) + c.eps;
    }
    return quotient(m / c.correction1, below) + c.decay * w;
  }
  __device__ float direction(float g, float w, float a, float b) const { return step(g, w, a, b); }
  __device__ void end(float norm_w, float norm_d) { ratio = quotient(norm_w, norm_d); }
  __device__ void move(float g, float& w, float& a, float& b) const {
    const float d = step(g, w, a, b);
    w = w - c.lr * (d * ratio);
  }
};

struct LarsSgd : Rule {
  static constexpr u32 A = ALL_COLUMNS, B = NO_STATE, SUMS = NORMS;
  float rate = 0.0f;
  __device__ void end(float norm_w, float norm_g) { rate = quotient(c.lr * norm_w, norm_g + c.decay * norm_w); }
  __device__ void move(float g, float& w, float& a, float& b) const {
    a = c.momentum * a + rate * (g + c.decay * w);
    w = w - a;
  }
};

struct Ftrl : Rule {
  static constexpr u32 A = ALL_COLUMNS, B = ALL_COLUMNS, SUMS = NO_SUM;
  __device__ void move(float g, float& w, float& n, float& z) const {
    const float square = g * g, old = n;
    n = old + square;
    const float root = sqrtf(n);
    // (new root - old root) without cancelling: their squares differ by g^2.
    const float sigma = quotient(square, root + sqrtf(old)) / c.lr;
    z = z + (g - sigma * w);
    const float minus_z = 0.0f - z;
    // sign(z) * l1 - z, wherever |z| is above l1.
    const float under = minus_z - larger(smaller(c.l1, minus_z), 0.0f - c.l1);
    const float moved = quotient(under, (c.beta + root) / c.lr + c.l2);
    w = larger(z, minus_z) <= c.l1 ? 0.0f : moved;
  }
};

struct Stay : Rule {
  static constexpr u32 A = NO_STATE, B = NO_STATE, SUMS = NO_SUM;
  __device__ void move(float g, float& w, float& a, float& b) const {}
};

// ---- one row -----------------------------------------------------------------------------------------------

// A row in work: V columns a lane at a time. Where the team takes all columns AT_ONCE they stay in
// registers; else the gradient lies at `wide`, and weights and states are read where they are.
template <class R, int V, bool AT_ONCE>
struct Row {
  const Table& table;
  const Team team;
  const u64 row, slot;
  float* wide;
  Columns<V> g, w, a, b;

  __device__ Row(const Table& table, const Team& team, u64 row, u64 slot, float* wide)
      : table(table), team(team), row(row), slot(slot), wide(wide), g(zeros<V>()), w(g), a(g), b(g) {}

  __device__ float* state() const { return reinterpret_cast<float*>(table.state) + slot * table.state_columns; }
  __device__ u64 end() const { return AT_ONCE ? 1 : table.dim; }

  // States behind a row of `dim + 1` numbers do not begin at a multiple of 16 bytes.
  static constexpr int STATE_V = R::A == ONE_NUMBER || R::B == ONE_NUMBER ? 1 : V;
  __device__ static Columns<V> read_state(const float* from) {
    if constexpr (STATE_V == V) {
      return read<V>(from);
    } else {
      Columns<V> columns;
#pragma unroll
      for (int k = 0; k < V; ++k) columns.x[k] = from[k];
      return columns;
    }
  }
  __device__ static void write_state(float* to, const Columns<V>& columns) {
    if constexpr (STATE_V == V) {
      write<V>(to, columns);
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) to[k] = columns.x[k];
    }
  }

  __device__ void read_row(u64 column) {
    if (column >= table.dim) return;
    w = read_weights<V>(table.weights, table.precision, slot * table.dim + column);
    if (R::A == ALL_COLUMNS) a = read_state(state() + column);
    if (R::B == ALL_COLUMNS) b = read_state(state() + table.dim + column);
  }
  // Gradient, weights and states of the lane's columns, zeros beyond the row's.
  __device__ void bring(u64 column) {
    if constexpr (!AT_ONCE) {
      g = w = a = b = zeros<V>();
      if (column < table.dim) g = read<V>(wide + column);
      read_row(column);
    }
  }
  __device__ void move(const R& rule) {
#pragma unroll
    for (int k = 0; k < V; ++k) rule.move(g.x[k], w.x[k], a.x[k], b.x[k]);
  }

  // Sums the gradient, clips it, moves the row; false, and nothing written, where a number is not
  // finite. `squares` is the sum of squares over all columns of the whole table, where these are not
  // all of them.
  __device__ bool update(const u64* words, const Runs& runs, const Pooled& pooled, u32 run, const float* squares) {
    const u64 step = team.lanes * V, own = team.lane * V;
    bool fine = true;
    if constexpr (AT_ONCE) read_row(own);
    for (u64 first = 0; first < end(); first += step) {
      const u64 column = first + own;
      if (column >= table.dim) continue;
      g = gradient<V>(table, words, runs, pooled, run, column);
      fine = fine && finite<V>(g);
      clip<V>(table, g);
      if constexpr (!AT_ONCE) write<V>(wide + column, g);
    }
    // A lane reads what it wrote alone. Elsewhere the row itself shows a gradient that is not finite.
    if (table.checks_gradient && !all(team, fine)) return false;

    R rule;
    rule.c = table.constants;
    if constexpr ((R::SUMS & SQUARES) != 0) {
      rule.one = state()[R::A == ONE_NUMBER ? 0 : table.dim];
      float total = 0.0f;
      for (u64 first = 0; first < end() && !squares; first += step) {
        bring(first + own);
        float x[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
          x[k] = rule.c.l2 == 0.0f ? g.x[k] : g.x[k] + rule.c.l2 * w.x[k];
          x[k] = x[k] * x[k];
        }
        total = add_blocks<V>(team, total, x);
      }
      rule.begin((squares ? squares[run] : total) / table.whole_dim);
    }
    if constexpr ((R::SUMS & NORMS) != 0) {
      float of_w = 0.0f, of_d = 0.0f;
      for (u64 first = 0; first < end(); first += step) {
        bring(first + own);
        float x[V], d[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
          x[k] = w.x[k] * w.x[k];
          d[k] = rule.direction(g.x[k], w.x[k], a.x[k], b.x[k]);
          d[k] = d[k] * d[k];
        }
        of_w = add_blocks<V>(team, of_w, x);
        of_d = add_blocks<V>(team, of_d, d);
      }
      rule.end(sqrtf(of_w), sqrtf(of_d));
    }

    fine = finite(rule.one);
    Bits<V> bits;
    for (u64 first = 0; first < end(); first += step) {
      const u64 column = first + own;
      if (column >= table.dim) continue;
      bring(column);
      move(rule);
      fine = fine && finite<V>(w) && finite<V>(a) && finite<V>(b);
      bits = rounded<V>(table, w, row, column, fine);
    }
    if (!all(team, fine)) return false;
    for (u64 first = 0; first < end(); first += step) {
      const u64 column = first + own;
      if (column >= table.dim) continue;
      if constexpr (!AT_ONCE) {
        bring(column);
        move(rule);
        bits = rounded<V>(table, w, row, column, fine);
      }
      write_weights<V>(table, slot * table.dim + column, bits);
      if (R::A == ALL_COLUMNS) write_state(state() + column, a);
      if (R::B == ALL_COLUMNS) write_state(state() + table.dim + column, b);
    }
    if (team.lane == 0 && R::A == ONE_NUMBER) state()[0] = rule.one;
    if (team.lane == 0 && R::B == ONE_NUMBER) state()[table.dim] = rule.one;
    return true;
  }
};

// A block's part of a launch: its table, and which of the table's runs are its teams'.
struct Part {
  u32 index, first, step, end;
  float* wide;
};

__device__ __forceinline__ Part part_of(const Work& work, Table& table, float* shared) {
  const u32 index = work.list[blockIdx.x / work.blocks];
  bring(table, work.tables + index);
  const u32 teams = blockDim.x / table.lanes, block = blockIdx.x % work.blocks, warp = threadIdx.x / 32;
  const u32 first = work.runs.table_runs[index] + block * teams + threadIdx.x / table.lanes;
  float* wide = work.wide ? work.wide + ((u64)blockIdx.x * (blockDim.x / 32) + warp) * work.wide_stride
                          : shared + warp * work.wide_stride;
  return {index, first, work.blocks * teams, work.runs.table_runs[index + 1], wide};
}

// Whether a run's row, or its number, is one that the operation may touch.
__device__ __forceinline__ bool in_reach(const Table& table, u64 row) {
  return table.reach_first <= row && row < table.reach_end;
}

template <class R, int V, bool AT_ONCE>
__device__ __forceinline__ void update_runs(const Table& table, const Work& work, const Part& part,
                                            const float* squares, u32* counts) {
  const Team team = team_of(table.lanes);
  const u64* slots = table.slots == NONE ? nullptr : work.words + table.slots;
  const u64* rows = table.rows == NONE ? nullptr : work.words + table.rows;
  for (u32 run = part.first; run < part.end; run += part.step) {
    const u64 number = work.runs.keys[run] - table.key_base;
    if (!in_reach(table, number)) continue;
    Row<R, V, AT_ONCE> row(table, team, rows ? rows[number] : number, slots ? slots[number] : number, part.wide);
    const bool moved = row.update(work.words, work.runs, work.pooled, run, squares);
    if (team.lane == 0) atomicAdd(&counts[moved ? 0 : 1], 1u);
  }
}

template <class R>
__device__ __forceinline__ void update_tables(const Work& work, const float* squares, u64* stats) {
  __shared__ Table table;
  __shared__ u32 counts[2];
  DYNAMIC_SHARED(float, shared);
  if (threadIdx.x < 2) counts[threadIdx.x] = 0;
  const Part part = part_of(work, table, shared);
  const bool at_once = table.dim <= table.lanes * (table.vector ? 4 : 1);
  if (table.vector && at_once) update_runs<R, 4, true>(table, work, part, squares, counts);
  else if (table.vector) update_runs<R, 4, false>(table, work, part, squares, counts);
  else if (at_once) update_runs<R, 1, true>(table, work, part, squares, counts);
  else update_runs<R, 1, false>(table, work, part, squares, counts);
  __syncthreads();
  if (threadIdx.x < 2 && counts[threadIdx.x] > 0) atomicAdd(&stats[part.index * 2 + threadIdx.x], (u64)counts[threadIdx.x]);
}

// The columns of a run's gradient in a row's team, one chunk after another, each given to `use` with its
// first column of the lane: all lanes come, those beyond the row with zeros.
template <int V, class Use>
__device__ __forceinline__ void each_chunk(const Table& table, const Work& work, const Team& team, u32 run, Use use) {
  for (u64 first = 0; first < table.dim; first += team.lanes * V) {
    const u64 column = first + team.lane * V;
    Columns<V> g = zeros<V>();
    if (column < table.dim) g = gradient<V>(table, work.words, work.runs, work.pooled, run, column);
    use(column, g);
  }
}

template <int V>
__device__ __forceinline__ void gradients_of_runs(const Table& table, const Work& work, const Part& part, const u8* marks,
                                                  u32 mark, float* out) {
  const Team team = team_of(table.lanes);
  for (u32 run = part.first; run < part.end; run += part.step) {
    if (marks && marks[run] != mark) continue;
    float* to = out + table.out + (u64)(run - work.runs.table_runs[part.index]) * table.dim;
    each_chunk<V>(table, work, team, run, [&](u64 column, const Columns<V>& g) {
      if (column >= table.dim) return;
#pragma unroll
      for (int k = 0; k < V; ++k) to[column + k] = g.x[k];
    });
  }
}

template <int V>
__device__ __forceinline__ void squares_of_runs(const Table& table, const Work& work, const Part& part, float* out) {
  const Team team = team_of(table.lanes);
  const u64* slots = table.slots == NONE ? nullptr : work.words + table.slots;
  const u64 blocks = (table.dim + 31) / 32;
  const float l2 = table.constants.l2;
  for (u32 run = part.first; run < part.end; run += part.step) {
    const u64 number = work.runs.keys[run] - table.key_base;
    if (!in_reach(table, number)) continue;
    const u64 slot = slots ? slots[number] : number;
    each_chunk<V>(table, work, team, run, [&](u64 column, Columns<V> g) {
      clip<V>(table, g);
      Columns<V> w = zeros<V>();
      if (l2 != 0.0f && column < table.dim)
        w = read_weights<V>(table.weights, table.precision, slot * table.dim + column);
      float x[V];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        x[k] = l2 == 0.0f ? g.x[k] : g.x[k] + l2 * w.x[k];
        x[k] = x[k] * x[k];
      }
      const float sum = block_sum<V>(team, x);
      if (column % 32 == 0 && column < table.dim) out[run * blocks + column / 32] = sum;
    });
  }
}

template <int V>
__device__ __forceinline__ void norms_of_runs(const Table& table, const Work& work, const Part& part, double* norms) {
  const Team team = team_of(table.lanes);
  for (u32 run = part.first; run < part.end; run += part.step) {
    double total = 0.0;
    each_chunk<V>(table, work, team, run, [&](u64, const Columns<V>& g) {
      double x[V];
#pragma unroll
      for (int k = 0; k < V; ++k) x[k] = (double)g.x[k] * (double)g.x[k];
      total = add_blocks<V>(team, total, x);
    });
    // The row of zeros of a dynamic table, which no update moves, counts for nothing.
    if (team.lane == 0) norms[run] = in_reach(table, work.runs.keys[run] - table.key_base) ? total : 0.0;
  }
}

// Threads of a block of long_sums, and terms of a tile.
constexpr u32 LONG_THREADS = 512, LONG_WARPS = LONG_THREADS / 32, LONG_TILE = 128;

}  // namespace embedding

using namespace embedding;

// A block for each 32 columns of a long run, `slices` of them a run; see above.
extern "C" __global__ void __launch_bounds__(512) long_sums(Work work, u32 tables, u32 slices) {
  __shared__ float tiles[2][LONG_TILE][32];
  constexpr u32 EACH = LONG_TILE / LONG_WARPS;
  const Runs& runs = work.runs;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u64 items = (u64)*runs.long_count * slices;
  u32 now = 0;
  for (u64 item = blockIdx.x; item < items; item += gridDim.x) {
    const u32 place = (u32)(item / slices), run = runs.long_runs[place];
    u32 index = 0, above = tables;  // the last table whose first run is not behind this one
    while (above - index > 1) {
      const u32 middle = (index + above) / 2;
      if (runs.table_runs[middle] <= run) index = middle;
      else above = middle;
    }
    const Table& table = work.tables[index];
    const u64 column = item % slices * 32 + lane;
    if (column - lane >= table.dim) continue;
    const bool active = column < table.dim;
    const u32 low = runs.starts[run], high = runs.starts[run + 1];
    float next[EACH];
    const auto load = [&](u32 first) {
#pragma unroll
      for (u32 k = 0; k < EACH; ++k) {
        const u64 at = (u64)first + k * LONG_WARPS + warp;
        next[k] = 0.0f;
        if (at >= high || !active) continue;
        next[k] = term_at(table, work.words, work.pooled, runs.terms[at])[column];
        if (table.scaled) next[k] = next[k] * runs.scales[at];
      }
    };
    load(low);
    float sum = 0.0f;
    for (u64 at = low; at < high; at += LONG_TILE) {
#pragma unroll
      for (u32 k = 0; k < EACH; ++k) tiles[now][k * LONG_WARPS + warp][lane] = next[k];
      // Behind it nobody reads the other tile, which is written next.
      __syncthreads();
      if (at + LONG_TILE < high) load((u32)at + LONG_TILE);
      if (warp == 0) {
        const u32 count = high - at < LONG_TILE ? (u32)(high - at) : LONG_TILE;
        u32 k = 0;
        if (at == low) sum = tiles[now][k++][lane];
        for (; k < count; ++k) sum = sum + tiles[now][k][lane];
      }
      now ^= 1;
    }
    if (warp == 0 && active) runs.long_sums[place * runs.long_stride + column] = sum;
  }
}

// Each moves the rows of the tables of a launch, whose rule it names. stats[table] = moved, stayed.
extern "C" __global__ void __launch_bounds__(256, 3) update_sgd(Work work, const float* squares, u64* stats) {
  update_tables<Sgd>(work, squares, stats);
}
extern "C" __global__ void __launch_bounds__(256, 3) update_adagrad(Work work, const float* squares, u64* stats) {
  update_tables<Adagrad>(work, squares, stats);
}
extern "C" __global__ void __launch_bounds__(256, 3) update_rowwise_adagrad(Work work, const float* squares, u64* stats) {
  update_tables<RowwiseAdagrad>(work, squares, stats);
}
extern "C" __global__ void __launch_bounds__(256, 3) update_adam(Work work, const float* squares, u64* stats) {
  update_tables<AdamKind<false, false>>(work, squares, stats);
}
extern "C" __global__ void __launch_bounds__(256, 3) update_partial_rowwise_adam(Work work, const float* squares, u64* stats) {
  update_tables<AdamKind<true, false>>(work, squares, stats);
}
extern "C" __global__ void __launch_bounds__(256, 3) update_lamb(Work work, const float* squares, u64* stats) {
  update_tables<AdamKind<false, true>>(work, squares, stats);
}
extern "C" __global__ void __launch_bounds__(256, 3) update_partial_rowwise_lamb(Work work, const float* squares, u64* stats) {
  update_tables<AdamKind<true, true>>(work, squares, stats);
}
extern "C" __global__ void __launch_bounds__(256, 3) update_lars_sgd(Work work, const float* squares, u64* stats) {
  update_tables<LarsSgd>(work, squares, stats);
}
extern "C" __global__ void __launch_bounds__(256, 3) update_ftrl(Work work, const float* squares, u64* stats) {
  update_tables<Ftrl>(work, squares, stats);
}
extern "C" __global__ void __launch_bounds__(256, 3) update_stay(Work work, const float* squares, u64* stats) {
  update_tables<Stay>(work, squares, stats);
}

// Each run's summed gradient, of those with this mark where there are marks: row i of a table at
// out[table.out + i * dim ..].
extern "C" __global__ void __launch_bounds__(256, 3) row_gradients(Work work, const u8* marks, u32 mark, float* out) {
  __shared__ Table table;
  const Part part = part_of(work, table, nullptr);
  if (table.vector) gradients_of_runs<4>(table, work, part, marks, mark, out);
  else gradients_of_runs<1>(table, work, part, marks, mark, out);
}

// Sums of squares over each 32 columns of what the rule sums: out is (runs, blocks of 32).
extern "C" __global__ void __launch_bounds__(256, 3) row_squares(Work work, float* out) {
  __shared__ Table table;
  const Part part = part_of(work, table, nullptr);
  if (table.vector) squares_of_runs<4>(table, work, part, out);
  else squares_of_runs<1>(table, work, part, out);
}

// The squared norm of each run's gradient, in float64.
extern "C" __global__ void __launch_bounds__(256, 3) row_norms(Work work, double* norms) {
  __shared__ Table table;
  const Part part = part_of(work, table, nullptr);
  if (table.vector) norms_of_runs<4>(table, work, part, norms);
  else norms_of_runs<1>(table, work, part, norms);
}

// sums[table] = the norms of its runs, added one after another: 8 cycles a run. A block a table.
extern "C" __global__ void __launch_bounds__(256) sum_norms(const double* norms, const u32* table_runs, double* sums) {
  __shared__ double tile[256];
  double sum = 0.0;
  const u32 end = table_runs[blockIdx.x + 1];
  for (u32 first = table_runs[blockIdx.x]; first < end; first += 256) {
    const u32 count = end - first < 256 ? end - first : 256;
    __syncthreads();
    if (threadIdx.x < count) tile[threadIdx.x] = norms[first + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0)
      for (u32 i = 0; i < count; ++i) sum = sum + tile[i];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
