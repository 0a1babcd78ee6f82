// Runs CUDA C++ kernels on the CPU, one fiber per CUDA thread. For tests only.
//
// A block's threads are fibers of one OS thread, switched only at __syncthreads, at warp
// collectives and at exit. The order in which runnable fibers are resumed is a parameter (forward,
// reverse, seeded shuffle): a kernel whose result changes with it has a race. A barrier or a warp
// collective that not all of its threads reach is told with their places, and ends the process.
//
// It has no speed, no tensor cores, no memory model: what it shows is results, bounds and order.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __CUDA_ON_HOST__ 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __constant__ static
#define __shared__ static thread_local  // one block at a time on each OS thread
#define DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(host_cuda::dynamic_shared())
#define __syncthreads() host_cuda::sync_block(__LINE__)
#define __syncwarp(...) host_cuda::sync_warp(__LINE__, ##__VA_ARGS__)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint3 {
  unsigned x, y, z;
};
#define HOST_VECTOR_2(name, T, bytes) \
  struct alignas(bytes) name {        \
    T x, y;                           \
  };                                  \
  inline name make_##name(T x, T y) { return {x, y}; }
#define HOST_VECTOR_4(name, T, bytes) \
  struct alignas(bytes) name {        \
    T x, y, z, w;                     \
  };                                  \
  inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
HOST_VECTOR_2(float2, float, 8)
HOST_VECTOR_2(int2, int, 8)
HOST_VECTOR_2(uint2, unsigned, 8)
HOST_VECTOR_2(ulonglong2, unsigned long long, 16)
HOST_VECTOR_2(longlong2, long long, 16)
HOST_VECTOR_2(double2, double, 16)
HOST_VECTOR_2(ushort2, unsigned short, 4)
HOST_VECTOR_4(float4, float, 16)
HOST_VECTOR_4(int4, int, 16)
HOST_VECTOR_4(uint4, unsigned, 16)
HOST_VECTOR_4(ushort4, unsigned short, 8)
HOST_VECTOR_4(uchar4, unsigned char, 4)

namespace host_cuda {
enum class Order { forward, reverse, shuffled };
struct Config {
  Order order = Order::forward;
  uint64_t seed = 1;
};
inline Config& config() {
  static Config c;
  return c;
}

constexpr unsigned WARP = 32;
constexpr unsigned THREADS_MAX = 1024;
constexpr size_t STACK_BYTES = 64 << 10;

// ---- fiber switch (System V x86-64: save the callee-saved registers, swap stacks) --------------
extern "C" void host_cuda_switch(void** from_sp, void* to_sp);
#if defined(__x86_64__)
asm(R"(
.text
.weak host_cuda_switch
.type host_cuda_switch,@function
host_cuda_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size host_cuda_switch,.-host_cuda_switch
)");
#else
#error "port host_cuda_switch"
#endif

enum class Wait : uint8_t { none, block, warp, done };
struct Thread {
  void* sp;
  char* stack;
  uint3 tid;
  unsigned linear;
  Wait wait;
  int line;
  unsigned mask;
};
struct Warp {
  uint64_t slot[WARP] = {};
};

struct Block {
  dim3 grid, dim;
  uint3 bid{};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<char> smem;
  std::vector<unsigned> order;
  void* main_sp = nullptr;
  Thread* current = nullptr;
  void (*entry)(void*) = nullptr;
  void* arg = nullptr;
};
inline thread_local Block* block = nullptr;
inline thread_local const void* main_bottom = nullptr;
inline thread_local size_t main_size = 0;

inline void asan_to([[maybe_unused]] const void* bottom, [[maybe_unused]] size_t size,
                    [[maybe_unused]] void** save) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(save, bottom, size);
#endif
}
inline void asan_landed([[maybe_unused]] void* save, [[maybe_unused]] const void** bottom = nullptr,
                        [[maybe_unused]] size_t* size = nullptr) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(save, bottom, size);
#endif
}

// Stacks of the largest block, kept by each OS thread: pages that no fiber touched take no memory.
inline char* stacks() {
  static thread_local char* kept = [] {
    void* p = mmap(nullptr, THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    return static_cast<char*>(p);
  }();
  return kept;
}

inline void yield_to_scheduler(bool exiting = false) {
  Block& b = *block;
  void* fake = nullptr;
  asan_to(main_bottom, main_size, exiting ? nullptr : &fake);
  host_cuda_switch(&b.current->sp, b.main_sp);
  asan_landed(fake);
}
[[noreturn]] inline void fiber_main() {
  asan_landed(nullptr, &main_bottom, &main_size);
  block->entry(block->arg);
  block->current->wait = Wait::done;
  yield_to_scheduler(true);
  abort();
}
inline void sync_block(int line) {
  Thread& t = *block->current;
  t.wait = Wait::block;
  t.line = line;
  yield_to_scheduler();
}
inline void sync_warp(int line, unsigned mask = 0xffffffffu) {
  Thread& t = *block->current;
  t.wait = Wait::warp;
  t.line = line;
  t.mask = mask;
  yield_to_scheduler();
}
inline void* dynamic_shared() {
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block->smem.data()) + 15) & ~uintptr_t(15));
}

[[noreturn]] inline void stuck(const char* why) {
  Block& b = *block;
  fprintf(stderr, "host_cuda: %s in block (%u,%u,%u)\n", why, b.bid.x, b.bid.y, b.bid.z);
  for (auto& t : b.threads)
    if (t.linear < 4 || t.linear + 2 > b.threads.size() || t.linear % WARP == 0)
      fprintf(stderr, "  thread %u: %s line %d mask %08x\n", t.linear,
              t.wait == Wait::block  ? "__syncthreads"
              : t.wait == Wait::warp ? "warp collective"
              : t.wait == Wait::done ? "exited"
                                     : "running",
              t.line, t.mask);
  abort();
}

// Releases barriers whose threads have all arrived; a barrier counts exited threads as arrived.
inline bool release(Block& b) {
  bool any = false;
  for (unsigned w = 0; w * WARP < b.threads.size(); ++w) {
    unsigned lo = w * WARP, hi = std::min<size_t>(lo + WARP, b.threads.size());
    unsigned live = 0;
    for (unsigned i = lo; i < hi; ++i)
      if (b.threads[i].wait != Wait::done) live |= 1u << (i - lo);
    for (unsigned i = lo; i < hi; ++i) {
      Thread& t = b.threads[i];
      if (t.wait != Wait::warp) continue;
      unsigned lanes = t.mask & live;
      if (!((t.mask >> (i - lo)) & 1)) stuck("a lane calls a warp collective whose mask leaves it out");
      bool all = true;
      for (unsigned j = lo; j < hi && all; ++j)
        if ((lanes >> (j - lo)) & 1)
          all = b.threads[j].wait == Wait::warp && b.threads[j].mask == t.mask && b.threads[j].line == t.line;
      if (!all) continue;
      for (unsigned j = lo; j < hi; ++j)
        if ((lanes >> (j - lo)) & 1) b.threads[j].wait = Wait::none;
      any = true;
    }
  }
  unsigned at = 0, live = 0;
  int line = 0;
  bool same = true;
  for (auto& t : b.threads) {
    if (t.wait == Wait::done) continue;
    ++live;
    if (t.wait == Wait::block) {
      if (at == 0) line = t.line;
      same &= line == t.line;
      ++at;
    }
  }
  if (live && at == live) {
    if (!same) stuck("__syncthreads reached at different lines (divergent barrier)");
    for (auto& t : b.threads)
      if (t.wait == Wait::block) t.wait = Wait::none;
    any = true;
  }
  return any;
}

inline void run_block(Block& b) {
  const size_t n = b.threads.size();
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stacks(), n * STACK_BYTES);
#endif
  for (auto& t : b.threads) {
    t.wait = Wait::none;
    auto* top = reinterpret_cast<void**>(t.stack + STACK_BYTES);
    *--top = nullptr;  // keeps the stack 16-byte aligned at entry
    *--top = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    t.sp = top;
  }
  uint64_t rng = (config().seed + 1) * 0x9e3779b97f4a7c15ull + b.bid.x + 1;
  auto& order = b.order;
  for (unsigned i = 0; i < n; ++i) order[i] = config().order == Order::reverse ? n - 1 - i : i;
  for (size_t done = 0; done < n;) {
    if (config().order == Order::shuffled)
      for (unsigned i = n - 1; i > 0; --i) {
        rng ^= rng << 13;
        rng ^= rng >> 7;
        rng ^= rng << 17;
        std::swap(order[i], order[rng % (i + 1)]);
      }
    bool ran = false;
    for (unsigned i : order) {
      Thread& t = b.threads[i];
      if (t.wait != Wait::none) continue;
      b.current = &t;
      ran = true;
      void* fake = nullptr;
      asan_to(t.stack, STACK_BYTES, &fake);
      host_cuda_switch(&b.main_sp, t.sp);
      asan_landed(fake);
      done += t.wait == Wait::done;
    }
    if (done < n && !release(b) && !ran) stuck("deadlock");
  }
}

template <class F>
void launch(dim3 grid, dim3 dim, size_t shared_bytes, F body) {
  Block b;
  b.grid = grid;
  b.dim = dim;
  b.smem.resize(shared_bytes + 16);
  size_t n = size_t(dim.x) * dim.y * dim.z;
  assert(n <= THREADS_MAX);
  b.threads.resize(n);
  b.order.resize(n);
  b.warps.resize((n + WARP - 1) / WARP);
  for (unsigned i = 0; i < n; ++i) {
    b.threads[i].stack = stacks() + i * STACK_BYTES;
    b.threads[i].linear = i;
    b.threads[i].tid = {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
  }
  b.entry = [](void* p) { (*static_cast<F*>(p))(); };
  b.arg = &body;
  Block* outer = block;
  block = &b;
  for (b.bid.z = 0; b.bid.z < grid.z; ++b.bid.z)
    for (b.bid.y = 0; b.bid.y < grid.y; ++b.bid.y)
      for (b.bid.x = 0; b.bid.x < grid.x; ++b.bid.x) {
        memset(b.smem.data(), 0xff, b.smem.size());  // NaNs: shared memory starts undefined
        run_block(b);
      }
  block = outer;
}

// ---- warp collectives --------------------------------------------------------------------------
template <class T, class Pick>
T exchange(int line, unsigned mask, T v, Pick pick) {
  static_assert(sizeof(T) <= 8, "shuffles take values of at most 8 bytes");
  Thread& t = *block->current;
  Warp& w = block->warps[t.linear / WARP];
  unsigned lane = t.linear % WARP;
  uint64_t bits = 0;
  memcpy(&bits, &v, sizeof v);
  w.slot[lane] = bits;
  sync_warp(line, mask);
  T out = pick(w, lane);
  sync_warp(-line, mask);  // nobody overwrites a slot still to be read
  return out;
}
template <class T>
T from_slot(const Warp& w, unsigned lane) {
  T v;
  memcpy(&v, &w.slot[lane], sizeof v);
  return v;
}
inline unsigned live_lanes(unsigned mask) {
  unsigned m = 0, w = block->current->linear / WARP;
  for (unsigned i = 0; i < WARP && w * WARP + i < block->threads.size(); ++i)
    if (block->threads[w * WARP + i].wait != Wait::done) m |= 1u << i;
  return m & mask;
}
// The lane a shuffle reads from, or the own one beyond the segment of `width` lanes.
inline unsigned in_segment(unsigned lane, int to, int width) {
  unsigned first = lane / width * width;
  return to < int(first) || to >= int(first) + width ? lane : unsigned(to);
}
template <class T>
T shfl_xor(int line, unsigned mask, T v, int o, int = 32) {
  return exchange<T>(line, mask, v, [=](const Warp& w, unsigned l) { return from_slot<T>(w, l ^ unsigned(o)); });
}
template <class T>
T shfl_down(int line, unsigned mask, T v, int o, int width = 32) {
  return exchange<T>(line, mask, v, [=](const Warp& w, unsigned l) { return from_slot<T>(w, in_segment(l, int(l) + o, width)); });
}
template <class T>
T shfl_up(int line, unsigned mask, T v, int o, int width = 32) {
  return exchange<T>(line, mask, v, [=](const Warp& w, unsigned l) { return from_slot<T>(w, in_segment(l, int(l) - o, width)); });
}
template <class T>
T shfl(int line, unsigned mask, T v, int s, int width = 32) {
  return exchange<T>(line, mask, v, [=](const Warp& w, unsigned l) {
    return from_slot<T>(w, l / width * width + unsigned(s) % width);
  });
}
inline unsigned ballot(int line, unsigned mask, bool p) {
  unsigned lanes = live_lanes(mask);
  return exchange<unsigned>(line, mask, p, [=](const Warp& w, unsigned) {
    unsigned r = 0;
    for (unsigned i = 0; i < WARP; ++i)
      if ((lanes >> i & 1) && w.slot[i]) r |= 1u << i;
    return r;
  });
}
template <class T>
unsigned match_any(int line, unsigned mask, T v) {
  unsigned lanes = live_lanes(mask);
  uint64_t mine = 0;
  memcpy(&mine, &v, sizeof v);
  return unsigned(exchange<uint64_t>(line, mask, mine, [=](const Warp& w, unsigned) {
    uint64_t r = 0;
    for (unsigned i = 0; i < WARP; ++i)
      if ((lanes >> i & 1) && w.slot[i] == mine) r |= 1u << i;
    return r;
  }));
}
template <class T, class Join>
T reduce(int line, unsigned mask, T v, Join join) {
  unsigned lanes = live_lanes(mask);
  return exchange<T>(line, mask, v, [=](const Warp& w, unsigned) {
    bool first = true;
    T r{};
    for (unsigned i = 0; i < WARP; ++i)
      if (lanes >> i & 1) {
        T x = from_slot<T>(w, i);
        r = first ? x : join(r, x);
        first = false;
      }
    return r;
  });
}
// Votes of a whole block, over shared memory as a kernel would do it.
inline int count_block(int line, bool p) {
  static thread_local int votes;
  sync_block(line);
  if (block->current->linear == 0) votes = 0;
  sync_block(line);
  votes += p;
  sync_block(line);
  return votes;
}
}  // namespace host_cuda

#define threadIdx (host_cuda::block->current->tid)
#define blockIdx (host_cuda::block->bid)
#define blockDim (host_cuda::block->dim)
#define gridDim (host_cuda::block->grid)
#define warpSize 32
#define __shfl_xor_sync(m, v, ...) host_cuda::shfl_xor(__LINE__, (m), (v), __VA_ARGS__)
#define __shfl_down_sync(m, v, ...) host_cuda::shfl_down(__LINE__, (m), (v), __VA_ARGS__)
#define __shfl_up_sync(m, v, ...) host_cuda::shfl_up(__LINE__, (m), (v), __VA_ARGS__)
#define __shfl_sync(m, v, ...) host_cuda::shfl(__LINE__, (m), (v), __VA_ARGS__)
#define __ballot_sync(m, p) host_cuda::ballot(__LINE__, (m), (p))
#define __any_sync(m, p) (__ballot_sync(m, p) != 0)
#define __all_sync(m, p) (__ballot_sync(m, !(p)) == 0)
#define __match_any_sync(m, v) host_cuda::match_any(__LINE__, (m), (v))
#define __activemask() host_cuda::live_lanes(0xffffffffu)
#define __reduce_add_sync(m, v) host_cuda::reduce(__LINE__, (m), (v), [](auto a, auto b) { return decltype(a)(a + b); })
#define __reduce_max_sync(m, v) host_cuda::reduce(__LINE__, (m), (v), [](auto a, auto b) { return a < b ? b : a; })
#define __reduce_min_sync(m, v) host_cuda::reduce(__LINE__, (m), (v), [](auto a, auto b) { return b < a ? b : a; })
#define __syncthreads_count(p) host_cuda::count_block(__LINE__, (p))
#define __syncthreads_or(p) (host_cuda::count_block(__LINE__, (p)) != 0)
#define __syncthreads_and(p) (host_cuda::count_block(__LINE__, !(p)) == 0)

// ---- atomics, intrinsics -----------------------------------------------------------------------
template <class T, class Join>
inline T host_atomic(T* p, Join join) {
  T old, now;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do {
    now = join(old);
  } while (!__atomic_compare_exchange(p, &old, &now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
// The value has the type of the place, as in CUDA's overloads.
template <class T>
struct host_same {
  using type = T;
};
template <class T>
using host_same_t = typename host_same<T>::type;
template <class T>
inline T atomicAdd(T* p, host_same_t<T> v) { return host_atomic(p, [=](T old) { return T(old + v); }); }
template <class T>
inline T atomicSub(T* p, host_same_t<T> v) { return host_atomic(p, [=](T old) { return T(old - v); }); }
template <class T>
inline T atomicMax(T* p, host_same_t<T> v) { return host_atomic(p, [=](T old) { return old < v ? v : old; }); }
template <class T>
inline T atomicMin(T* p, host_same_t<T> v) { return host_atomic(p, [=](T old) { return v < old ? v : old; }); }
template <class T>
inline T atomicOr(T* p, host_same_t<T> v) { return host_atomic(p, [=](T old) { return T(old | v); }); }
template <class T>
inline T atomicAnd(T* p, host_same_t<T> v) { return host_atomic(p, [=](T old) { return T(old & v); }); }
template <class T>
inline T atomicExch(T* p, host_same_t<T> v) { return host_atomic(p, [=](T) { return v; }); }
template <class T>
inline T atomicCAS(T* p, host_same_t<T> expected, host_same_t<T> desired) {
  __atomic_compare_exchange(p, &expected, &desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <class T>
inline T __ldg(const T* p) { return *p; }
template <class T>
inline T __ldcs(const T* p) { return *p; }
template <class T>
inline T __ldcg(const T* p) { return *p; }
template <class T>
inline void __stcs(T* p, host_same_t<T> v) { *p = v; }
template <class T>
inline void __stcg(T* p, host_same_t<T> v) { *p = v; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline long long clock64() { return 0; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[noreturn]] inline void __trap() {
  fprintf(stderr, "host_cuda: __trap\n");
  abort();
}
template <class To, class From>
inline To host_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(int i) { return host_bits<float>(i); }
inline int __float_as_int(float f) { return host_bits<int>(f); }
inline float __uint_as_float(unsigned i) { return host_bits<float>(i); }
inline unsigned __float_as_uint(float f) { return host_bits<unsigned>(f); }
inline long long __double_as_longlong(double f) { return host_bits<long long>(f); }
inline double __longlong_as_double(long long i) { return host_bits<double>(i); }
using std::isfinite;
using std::isinf;
using std::isnan;
template <class T>
inline T min(T a, T b) { return b < a ? b : a; }
template <class T>
inline T max(T a, T b) { return a < b ? b : a; }
