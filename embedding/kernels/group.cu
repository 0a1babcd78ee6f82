// Grouping of a batch's ids: the different rows of all tables, ascending, and each one's occurrences in
// (feature, sample, position) order.
//
//   expand_ids    ids -> keys: the table's base + row; terms and scales, in canonical order
//   radix_*       keys with their places, sorted stably by 8 bits of the key a pass
//   write_runs    a run of equal keys is a row: keys, starts; terms and scales in the order of runs
//   find_*        first run of each table; runs so long that blocks of their own sum them
//
// Every result is a function of the input: ranks come from counts in a fixed order. The one list whose
// order may differ, of long runs, is read by place only.
//
// Bytes an id: expand 8 read, 12 written (16 with scales); a pass of the sort 20 to count and move
// keys read, 12 written, in runs of about 8 ids a digit; runs 16 read, 16 written. At four passes that
// is 180 bytes an id: 1.7 M ids, a batch of 64 K samples of 26 features, take 0.1 ms at 3 TB/s.
// Occupancy: blocks of 256 threads, at most 32 registers (64 in radix_scatter, whose keys and ranks stay
// there) and 10 KiB of shared memory: 8 blocks a multiprocessor, 4 of radix_scatter; memory is the
// limit, in the pass's scattered writes.
#include "embedding.cuh"

namespace embedding {

// Threads of a block, and ids of a tile: 8 a thread.
constexpr u32 THREADS = 256, WARPS = THREADS / 32, ITEMS = 8, TILE = THREADS * ITEMS;
constexpr u32 DIGITS = 256;

// Bags of one feature.
struct Bags {
  const u64* offsets;  // (bags + 1), counted from the feature's first id
  u64 first_id;        // among the ids of all features
  u64 key_base;
  u32 first_term, mean, weighted, unused;
};

// Sums of `value` over the threads before this one, of 256; `total` is that of all.
__device__ __forceinline__ u32 sum_before(u32 value, u32& total) {
  __shared__ u32 warp_sums[WARPS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 sum = value;
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // the former call's sums were read
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  u32 before = 0;
  total = 0;
  for (u32 w = 0; w < WARPS; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  return before + sum - value;
}

__device__ __forceinline__ u32 digit_of(u64 key, u32 shift) { return (u32)(key >> shift) % DIGITS; }

// The first of `count` ascending keys that is not below `key`.
__device__ __forceinline__ u32 lower_bound(const u64* keys, u32 count, u64 key) {
  u32 low = 0, high = count;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (keys[middle] < key) low = middle + 1;
    else high = middle;
  }
  return low;
}

}  // namespace embedding

using namespace embedding;

// Eight lanes a bag. keys, terms and scales are (ids); scales may be null, where none but 1 occur.
extern "C" __global__ void __launch_bounds__(256)
    expand_ids(const Bags* features, u64 bags, u64 bags_of_all, const u64* ids, const float* weights, u64* keys,
               u32* terms, float* scales) {
  const u64 step = (u64)gridDim.x * blockDim.x / 8;
  for (u64 at = thread_of_grid() / 8; at < bags_of_all; at += step) {
    const u64 index = at / bags, bag = at - index * bags;
    const Bags feature = features[index];
    const u64 low = feature.offsets[bag], high = feature.offsets[bag + 1];
    const float share = feature.mean ? 1.0f / (float)(high - low) : 1.0f;
    for (u64 i = low + threadIdx.x % 8; i < high; i += 8) {
      const u64 place = feature.first_id + i;
      keys[place] = feature.key_base + ids[place];
      terms[place] = feature.first_term + (u32)bag;
      if (scales) scales[place] = feature.weighted ? weights[place] : share;
    }
  }
}

// counts[digit][tile] = keys of the tile with that digit. A block a tile.
extern "C" __global__ void __launch_bounds__(256) radix_count(const u64* keys, u64 n, u32 shift, u32* counts) {
  __shared__ u32 of_tile[DIGITS];
  of_tile[threadIdx.x] = 0;
  __syncthreads();
  const u64 first = (u64)blockIdx.x * TILE;
  for (u32 item = 0; item < ITEMS; ++item) {
    const u64 i = first + item * THREADS + threadIdx.x;
    if (i < n) atomicAdd(&of_tile[digit_of(keys[i], shift)], 1u);
  }
  __syncthreads();
  counts[(u64)threadIdx.x * gridDim.x + blockIdx.x] = of_tile[threadIdx.x];
}

// counts[digit][tile] becomes the keys of that digit in former tiles, totals[digit] those of all. A
// block a digit.
extern "C" __global__ void __launch_bounds__(256) radix_scan(u32* counts, u32* totals, u32 tiles) {
  u32* of_digit = counts + (u64)blockIdx.x * tiles;
  u32 before = 0;
  for (u32 first = 0; first < tiles; first += THREADS) {
    const u32 tile = first + threadIdx.x;
    const u32 count = tile < tiles ? of_digit[tile] : 0;
    u32 total;
    const u32 sum = sum_before(count, total);
    if (tile < tiles) of_digit[tile] = before + sum;
    before += total;
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = before;
}

// Moves keys and places to where their digit lies, equal digits in the order that they had. A block a
// tile, whose warps have neighbouring parts; `places` is null where a key's place is its own.
extern "C" __global__ void __launch_bounds__(256)
    radix_scatter(const u64* keys, const u32* places, u64 n, u32 shift, const u32* counts, const u32* totals,
                  u64* keys_out, u32* places_out) {
  __shared__ u32 of_warp[WARPS][DIGITS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (u32 w = 0; w < WARPS; ++w) of_warp[w][threadIdx.x] = 0;
  // Of the thread's digit: where the tile's keys begin.
  u32 all;
  u32 next = sum_before(totals[threadIdx.x], all) + counts[(u64)threadIdx.x * gridDim.x + blockIdx.x];
  __syncthreads();
  const u64 first = (u64)blockIdx.x * TILE + warp * 32 * ITEMS + lane;
  u64 key[ITEMS];
  u32 rank[ITEMS];
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) {
    const u64 i = first + item * 32;
    key[item] = i < n ? keys[i] : 0;
    const u32 digit = i < n ? digit_of(key[item], shift) : DIGITS;
    const u32 alike = __match_any_sync(~0u, digit);
    const u32 before = __popc(alike & ((1u << lane) - 1));
    u32 former = 0;
    if (i < n) former = of_warp[warp][digit];
    __syncwarp(~0u);
    if (i < n && before == 0) of_warp[warp][digit] = former + __popc(alike);
    __syncwarp(~0u);
    rank[item] = former + before;
  }
  __syncthreads();
  for (u32 w = 0; w < WARPS; ++w) {
    const u32 count = of_warp[w][threadIdx.x];
    of_warp[w][threadIdx.x] = next;
    next += count;
  }
  __syncthreads();
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) {
    const u64 i = first + item * 32;
    if (i >= n) continue;
    const u32 to = of_warp[warp][digit_of(key[item], shift)] + rank[item];
    keys_out[to] = key[item];
    places_out[to] = places ? places[i] : (u32)i;
  }
}

// heads[tile] = runs that begin in the tile. A block a tile.
extern "C" __global__ void __launch_bounds__(256) count_heads(const u64* keys, u64 n, u32* heads) {
  u32 count = 0;
  for (u32 item = 0; item < ITEMS; ++item) {
    const u64 i = (u64)blockIdx.x * TILE + item * THREADS + threadIdx.x;
    if (i < n && (i == 0 || keys[i] != keys[i - 1])) ++count;
  }
  u32 total;
  sum_before(count, total);
  if (threadIdx.x == 0) heads[blockIdx.x] = total;
}

// heads[tile] becomes the runs that begin in former tiles, *runs those of all. One block.
extern "C" __global__ void __launch_bounds__(256) scan_heads(u32* heads, u32 tiles, u32* runs) {
  u32 before = 0;
  for (u32 first = 0; first < tiles; first += THREADS) {
    const u32 tile = first + threadIdx.x;
    u32 total;
    const u32 sum = sum_before(tile < tiles ? heads[tile] : 0, total);
    if (tile < tiles) heads[tile] = before + sum;
    before += total;
  }
  if (threadIdx.x == 0) *runs = before;
}

// Keys and starts of runs; terms and scales in their order. A block a tile, a thread 8 neighbours.
extern "C" __global__ void __launch_bounds__(256)
    write_runs(const u64* keys, const u32* places, u64 n, const u32* heads, const u32* terms, const float* scales,
               u64* run_keys, u32* starts, u32* terms_out, float* scales_out) {
  const u64 first = (u64)blockIdx.x * TILE + threadIdx.x * ITEMS;
  u32 begins = 0;  // a bit an item
  for (u32 item = 0; item < ITEMS; ++item) {
    const u64 i = first + item;
    if (i < n && (i == 0 || keys[i] != keys[i - 1])) begins |= 1u << item;
  }
  u32 total;
  u32 run = heads[blockIdx.x] + sum_before(__popc(begins), total);
  for (u32 item = 0; item < ITEMS; ++item) {
    const u64 i = first + item;
    if (i >= n) return;
    if (begins >> item & 1) {
      run_keys[run] = keys[i];
      starts[run] = (u32)i;
      ++run;
    }
    terms_out[i] = terms[places[i]];
    if (scales) scales_out[i] = scales[places[i]];
    if (i == n - 1) starts[run] = (u32)n;
  }
}

// First run of each table; behind the last table's, the number of all runs. A thread a table.
extern "C" __global__ void __launch_bounds__(256)
    find_tables(const u64* run_keys, const u32* runs, const u64* key_bases, u32 tables, u32* table_runs) {
  const u32 table = (u32)thread_of_grid();
  if (table < tables) table_runs[table] = lower_bound(run_keys, *runs, key_bases[table]);
  if (table == tables) table_runs[table] = *runs;
}

// Lists the runs of more than LONG_RUN terms, in any order.
extern "C" __global__ void __launch_bounds__(256)
    find_long(const u32* starts, const u32* runs, u32* long_count, u32* long_runs, u32* long_index) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 run = thread_of_grid(); run < *runs; run += step) {
    if (starts[run + 1] - starts[run] <= LONG_RUN) continue;
    const u32 place = atomicAdd(long_count, 1u);
    long_runs[place] = (u32)run;
    long_index[run] = place;
  }
}
