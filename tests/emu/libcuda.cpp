// A stand-in for NVIDIA's driver, libcuda.so.1: what this workspace calls of it, with kernels that
// g++ compiled. For tests only.
//
// Streams are queues. Their work is done when the host waits for something, or now and then when
// it queues more, in a seeded random order of the streams that honours the events: work that lacks
// a wait runs too early or too late. Memory is not zero at first, ends at a page that nobody may
// touch, and is gone at once when freed: work that still uses it crashes.
//
//   TESSERA_EMU_SEED          order of streams and of threads (default 1)
//   TESSERA_EMU_DEVICES       GPUs (default 1); with 0, cuInit says that there is none
//   TESSERA_EMU_DRIVER        version (default 12080)
//   TESSERA_EMU_CAPABILITY    compute capability (default 90)
//   TESSERA_EMU_MEMORY_BYTES  of each GPU (default 32 GiB)
//   TESSERA_EMU_FAIL          NAME:N:CODE, the N-th call of NAME fails with CODE, and all after it
#include <dlfcn.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "emu.hpp"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

using CUresult = int;
using ptr = unsigned long long;
enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  NO_BINARY_FOR_GPU = 209,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  LAUNCH_FAILED = 719,
};

namespace {
uint64_t from_env(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

struct Context {
  int device;
  size_t used_bytes = 0;
};
struct EventState {
  unsigned recorded = 0, reached = 0;
};
struct Event {
  Context* context;
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};
struct Stream {
  Context* context;
  bool destroyed = false;
  std::deque<std::function<bool()>> work;  // false: not yet
};
struct Memory {
  Context* context;
  size_t bytes;
  char* map;
  size_t map_bytes;
};
struct Module {
  std::string source;
};
// Work that a stream holds at most; the driver makes the host wait beyond such a number too.
constexpr size_t QUEUED_MAX = 1024;
constexpr size_t PAGE = 4096;
// Larger memory is filled at its ends only, and made zero by giving its pages back.
constexpr size_t LARGE = 16 << 20;

struct State {
  std::recursive_mutex lock;
  bool initialised = false;
  uint64_t rng = 0;
  unsigned eager = 0;  // percent of queued work after which some work is done
  CUresult broken = OK;
  std::map<std::string, uint64_t> calls;
  std::vector<std::unique_ptr<Context>> contexts;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::map<uintptr_t, Memory> device, pinned;
  std::set<Module*> modules;
};
State& state() {
  static State* s = [] {
    auto* s = new State;
    const uint64_t seed = from_env("TESSERA_EMU_SEED", 1);
    s->rng = 88172645463325252ull ^ (seed + 1) * 0x9e3779b97f4a7c15ull;
    s->eager = seed % 3 * 25;
    host_cuda::config().seed = seed;
    host_cuda::config().order = host_cuda::Order(seed % 3);
    return s;
  }();
  return *s;
}
// Filled by initialisers of the kernels' files, in any order.
std::map<std::pair<std::string, std::string>, emu::Kernel>& kernels() {
  static auto* k = new std::map<std::pair<std::string, std::string>, emu::Kernel>;
  return *k;
}
std::vector<emu::Text>& texts() {
  static auto* t = new std::vector<emu::Text>;
  return *t;
}
thread_local Context* current = nullptr;

uint64_t draw() {
  uint64_t& rng = state().rng;
  rng ^= rng << 13;
  rng ^= rng >> 7;
  rng ^= rng << 17;
  return rng;
}
[[noreturn]] void die(const char* why) {
  fprintf(stderr, "libcuda stand-in: %s\n", why);
  abort();
}

// One piece of work of one stream, chosen by chance among those that can go on.
bool step() {
  std::vector<Stream*> busy;
  for (auto* s : state().streams)
    if (!s->work.empty()) busy.push_back(s);
  for (size_t k = busy.size(); k--;) {
    std::swap(busy[k], busy[draw() % (k + 1)]);
    if (busy[k]->work.front()()) {
      busy[k]->work.pop_front();
      if (busy[k]->destroyed && busy[k]->work.empty()) {
        state().streams.erase(busy[k]);
        delete busy[k];
      }
      return true;
    }
  }
  return false;
}
template <class Until>
void pump(Until until) {
  while (!until())
    if (!step()) die("the host waits for work that nobody queued, or streams wait for one another");
}
void queue(Stream* s, std::function<bool()> work) {
  s->work.push_back(std::move(work));
  if (s->work.size() > QUEUED_MAX) pump([&] { return s->work.size() <= QUEUED_MAX / 2; });
  if (draw() % 100 < state().eager)
    for (uint64_t steps = draw() % 4; steps-- && step();) {
    }
}
void later(Stream* s, std::function<void()> work) {
  queue(s, [=] {
    work();
    return true;
  });
}

// ---- memory ------------------------------------------------------------------------------------
const Memory* find(const std::map<uintptr_t, Memory>& in, uintptr_t at, size_t bytes) {
  auto next = in.upper_bound(at);
  if (next == in.begin()) return nullptr;
  const auto& [start, memory] = *std::prev(next);
  return at - start <= memory.bytes && bytes <= memory.bytes - (at - start) ? &memory : nullptr;
}
bool on_device(ptr at, size_t bytes) { return find(state().device, at, bytes); }
bool is_pinned(const void* at, size_t bytes) { return find(state().pinned, uintptr_t(at), bytes); }

#if defined(__SANITIZE_ADDRESS__)
// The sanitizer sees each byte beyond.
char* make(Memory& memory) {
  void* p = nullptr;
  if (posix_memalign(&p, 256, memory.bytes)) return nullptr;
  memory.map = static_cast<char*>(p);
  if (memory.bytes < LARGE) memset(p, 0xff, memory.bytes);
  return memory.map;
}
void unmake(uintptr_t, const Memory& memory) { free(memory.map); }
void fill(ptr at, unsigned char value, size_t bytes) { memset(reinterpret_cast<void*>(at), value, bytes); }
#else
// [page that nobody may touch][slack][memory, aligned to 256 bytes][slack][such a page]
constexpr unsigned char CANARY = 0xa5;
char* make(Memory& memory) {
  const size_t room = (memory.bytes + 255) / 256 * 256, body = (room + PAGE - 1) / PAGE * PAGE;
  memory.map_bytes = body + 2 * PAGE;
  void* p = mmap(nullptr, memory.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  memory.map = static_cast<char*>(p);
  mprotect(memory.map, PAGE, PROT_NONE);
  mprotect(memory.map + PAGE + body, PAGE, PROT_NONE);
  char* start = memory.map + PAGE + body - room;
  memset(memory.map + PAGE, CANARY, body - room);
  memset(start + memory.bytes, CANARY, room - memory.bytes);
  const size_t dirty = memory.bytes < LARGE ? memory.bytes : 1 << 20;
  memset(start, 0xff, dirty);
  memset(start + memory.bytes - dirty, 0xff, dirty);
  return start;
}
void unmake(uintptr_t at, const Memory& memory) {
  auto* start = reinterpret_cast<char*>(at);
  char *first = memory.map + PAGE, *last = memory.map + memory.map_bytes - PAGE;
  for (char* p = first; p < last; ++p) {
    if (p == start) p = start + memory.bytes;
    if (p < last && static_cast<unsigned char>(*p) != CANARY) die("a kernel or copy wrote beside its memory");
  }
  munmap(memory.map, memory.map_bytes);
}
void fill(ptr at, unsigned char value, size_t bytes) {
  auto* p = reinterpret_cast<char*>(at);
  if (value == 0 && bytes >= LARGE) {
    char* first = reinterpret_cast<char*>((at + PAGE - 1) / PAGE * PAGE);
    char* last = reinterpret_cast<char*>((at + bytes) / PAGE * PAGE);
    memset(p, 0, first - p);
    madvise(first, last - first, MADV_DONTNEED);
    memset(last, 0, p + bytes - last);
  } else {
    memset(p, value, bytes);
  }
}
#endif

CUresult allocate(std::map<uintptr_t, Memory>& in, size_t bytes, bool counts, ptr* out) {
  if (bytes == 0) return INVALID_VALUE;
  if (counts && bytes > from_env("TESSERA_EMU_MEMORY_BYTES", 32ull << 30) - current->used_bytes) return OUT_OF_MEMORY;
  Memory memory{current, bytes, nullptr, 0};
  char* start = make(memory);
  if (!start) return OUT_OF_MEMORY;
  in[uintptr_t(start)] = memory;
  if (counts) current->used_bytes += bytes;
  *out = ptr(start);
  return OK;
}
CUresult release(std::map<uintptr_t, Memory>& in, uintptr_t at, bool counts) {
  auto it = in.find(at);
  if (it == in.end()) return INVALID_VALUE;
  unmake(at, it->second);
  if (counts) it->second.context->used_bytes -= it->second.bytes;
  in.erase(it);
  return OK;
}

// ---- calls -------------------------------------------------------------------------------------
// Counts a call, and whether it is to fail.
CUresult called(const char* name) {
  auto& s = state();
  if (s.broken) return s.broken;
  const char* wish = getenv("TESSERA_EMU_FAIL");
  if (!wish) return OK;
  const std::string text = wish;
  const auto first = text.find(':'), second = text.find(':', first + 1);
  if (first == std::string::npos || second == std::string::npos) die("TESSERA_EMU_FAIL is not NAME:N:CODE");
  if (text.substr(0, first) != name) return OK;
  if (++s.calls[name] < std::stoull(text.substr(first + 1))) return OK;
  return s.broken = std::stoi(text.substr(second + 1));
}
Stream* known(void* stream) {
  auto* s = static_cast<Stream*>(stream);
  return state().streams.count(s) && !s->destroyed ? s : nullptr;
}
Event* known_event(void* event) {
  auto* e = static_cast<Event*>(event);
  return state().events.count(e) ? e : nullptr;
}
const char* name_of(CUresult e) {
  switch (e) {
    case OK: return "CUDA_SUCCESS";
    case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case NOT_INITIALIZED: return "CUDA_ERROR_NOT_INITIALIZED";
    case NO_DEVICE: return "CUDA_ERROR_NO_DEVICE";
    case INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
    case INVALID_IMAGE: return "CUDA_ERROR_INVALID_IMAGE";
    case INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
    case NO_BINARY_FOR_GPU: return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case INVALID_HANDLE: return "CUDA_ERROR_INVALID_HANDLE";
    case NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    case NOT_READY: return "CUDA_ERROR_NOT_READY";
    case LAUNCH_FAILED: return "CUDA_ERROR_LAUNCH_FAILED";
    default: return nullptr;
  }
}
}  // namespace

namespace emu {
void add(Kernel kernel) {
  auto key = std::pair(kernel.source, kernel.name);
  kernels()[key] = std::move(kernel);
}
void add(Text text) { texts().push_back(std::move(text)); }
}  // namespace emu

#define API __attribute__((visibility("default"))) CUresult
// Every call but the first ones: under the lock, initialised, not made to fail.
#define BEGIN(name)                                 \
  std::lock_guard guard(state().lock);              \
  if (!state().initialised) return NOT_INITIALIZED; \
  if (CUresult fault = called(#name)) return fault
// Calls that need a context.
#define BEGIN_IN(name) \
  BEGIN(name);         \
  if (!current) return INVALID_CONTEXT

extern "C" {
API cuDriverGetVersion(int* v) {
  *v = int(from_env("TESSERA_EMU_DRIVER", 12080));
  return OK;
}
API cuInit(unsigned) {
  std::lock_guard guard(state().lock);
  if (CUresult fault = called("cuInit")) return fault;
  const auto devices = from_env("TESSERA_EMU_DEVICES", 1);
  if (devices == 0) return NO_DEVICE;
  while (state().contexts.size() < devices)
    state().contexts.push_back(std::make_unique<Context>(Context{int(state().contexts.size())}));
  state().initialised = true;
  return OK;
}
API cuGetErrorName(CUresult e, const char** s) { return (*s = name_of(e)) ? OK : INVALID_VALUE; }
API cuGetErrorString(CUresult e, const char** s) {
  *s = name_of(e) ? "said by the stand-in" : nullptr;
  return *s ? OK : INVALID_VALUE;
}
API cuDeviceGetCount(int* n) {
  BEGIN(cuDeviceGetCount);
  *n = int(state().contexts.size());
  return OK;
}
API cuDeviceGet(int* d, int i) {
  BEGIN(cuDeviceGet);
  if (i < 0 || size_t(i) >= state().contexts.size()) return INVALID_DEVICE;
  *d = i;
  return OK;
}
API cuDeviceGetName(char* s, int n, int) {
  BEGIN(cuDeviceGetName);
  snprintf(s, n, "stand-in on the host");
  return OK;
}
API cuDeviceGetAttribute(int* v, int attribute, int) {
  BEGIN(cuDeviceGetAttribute);
  const int capability = int(from_env("TESSERA_EMU_CAPABILITY", 90));
  *v = attribute == 75   ? capability / 10
       : attribute == 76 ? capability % 10
       : attribute == 16 ? 4
       : attribute == 97 ? 227 << 10
       : attribute == 10 ? 32
                         : 0;
  return OK;
}
API cuDeviceTotalMem_v2(size_t* b, int) {
  BEGIN(cuDeviceTotalMem_v2);
  *b = from_env("TESSERA_EMU_MEMORY_BYTES", 32ull << 30);
  return OK;
}
API cuDevicePrimaryCtxRetain(void** c, int device) {
  BEGIN(cuDevicePrimaryCtxRetain);
  if (device < 0 || size_t(device) >= state().contexts.size()) return INVALID_DEVICE;
  *c = state().contexts[device].get();
  return OK;
}
API cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API cuCtxGetCurrent(void** c) {
  BEGIN(cuCtxGetCurrent);
  *c = current;
  return OK;
}
API cuCtxSetCurrent(void* c) {
  BEGIN(cuCtxSetCurrent);
  current = static_cast<Context*>(c);
  return OK;
}
API cuCtxSynchronize() {
  BEGIN_IN(cuCtxSynchronize);
  pump([] {
    for (auto* s : state().streams)
      if (s->context == current && !s->work.empty()) return false;
    return true;
  });
  return OK;
}
API cuStreamCreate(void** s, unsigned) {
  BEGIN_IN(cuStreamCreate);
  auto* made = new Stream{current};
  state().streams.insert(made);
  *s = made;
  return OK;
}
API cuStreamDestroy_v2(void* stream) {
  BEGIN_IN(cuStreamDestroy_v2);
  auto* s = known(stream);
  if (!s) return INVALID_HANDLE;
  s->destroyed = true;  // what was queued goes on
  if (s->work.empty()) {
    state().streams.erase(s);
    delete s;
  }
  return OK;
}
API cuStreamSynchronize(void* stream) {
  BEGIN_IN(cuStreamSynchronize);
  auto* s = known(stream);
  if (!s) return INVALID_HANDLE;
  pump([&] { return s->work.empty(); });
  return state().broken;
}
API cuStreamWaitEvent(void* stream, void* event, unsigned) {
  BEGIN_IN(cuStreamWaitEvent);
  auto *s = known(stream);
  auto* e = known_event(event);
  if (!s || !e) return INVALID_HANDLE;
  queue(s, [state = e->state, need = e->state->recorded] { return state->reached >= need; });
  return OK;
}
API cuEventCreate(void** e, unsigned) {
  BEGIN_IN(cuEventCreate);
  auto* made = new Event{current};
  state().events.insert(made);
  *e = made;
  return OK;
}
API cuEventDestroy_v2(void* event) {
  BEGIN_IN(cuEventDestroy_v2);
  auto* e = known_event(event);
  if (!e) return INVALID_HANDLE;
  state().events.erase(e);
  delete e;  // queued waits keep its state
  return OK;
}
API cuEventRecord(void* event, void* stream) {
  BEGIN_IN(cuEventRecord);
  auto* s = known(stream);
  auto* e = known_event(event);
  if (!s || !e || s->context != e->context) return INVALID_HANDLE;
  later(s, [state = e->state, n = ++e->state->recorded] { state->reached = n; });
  return OK;
}
API cuEventQuery(void* event) {
  BEGIN_IN(cuEventQuery);
  auto* e = known_event(event);
  if (!e) return INVALID_HANDLE;
  if (e->state->reached < e->state->recorded) step();  // time passes
  return e->state->reached < e->state->recorded ? NOT_READY : OK;
}
API cuEventSynchronize(void* event) {
  BEGIN_IN(cuEventSynchronize);
  auto* e = known_event(event);
  if (!e) return INVALID_HANDLE;
  pump([&] { return e->state->reached >= e->state->recorded; });
  return state().broken;
}
API cuMemGetInfo_v2(size_t* free, size_t* total) {
  BEGIN_IN(cuMemGetInfo_v2);
  *total = from_env("TESSERA_EMU_MEMORY_BYTES", 32ull << 30);
  *free = *total - current->used_bytes;
  return OK;
}
API cuMemAlloc_v2(ptr* p, size_t n) {
  BEGIN_IN(cuMemAlloc_v2);
  return allocate(state().device, n, true, p);
}
API cuMemFree_v2(ptr p) {
  BEGIN_IN(cuMemFree_v2);
  return release(state().device, p, true);
}
API cuMemHostAlloc(void** p, size_t n, unsigned) {
  BEGIN_IN(cuMemHostAlloc);
  ptr made = 0;
  if (CUresult fault = allocate(state().pinned, n, false, &made)) return fault;
  *p = reinterpret_cast<void*>(made);
  return OK;
}
API cuMemFreeHost(void* p) {
  BEGIN_IN(cuMemFreeHost);
  return release(state().pinned, uintptr_t(p), false);
}
API cuMemsetD8Async(ptr p, unsigned char v, size_t n, void* stream) {
  BEGIN_IN(cuMemsetD8Async);
  auto* s = known(stream);
  if (!s) return INVALID_HANDLE;
  if (!on_device(p, n)) return INVALID_VALUE;
  later(s, [=] { fill(p, v, n); });
  return OK;
}
API cuMemcpyHtoDAsync_v2(ptr d, const void* h, size_t n, void* stream) {
  BEGIN_IN(cuMemcpyHtoDAsync_v2);
  auto* s = known(stream);
  if (!s) return INVALID_HANDLE;
  if (!on_device(d, n)) return INVALID_VALUE;
  if (is_pinned(h, n)) {  // read when the copy runs
    later(s, [=] { memcpy(reinterpret_cast<void*>(d), h, n); });
  } else {
    auto from = static_cast<const char*>(h);
    later(s, [d, staged = std::vector<char>(from, from + n)] { memcpy(reinterpret_cast<void*>(d), staged.data(), staged.size()); });
  }
  return OK;
}
API cuMemcpyDtoHAsync_v2(void* h, ptr d, size_t n, void* stream) {
  BEGIN_IN(cuMemcpyDtoHAsync_v2);
  auto* s = known(stream);
  if (!s) return INVALID_HANDLE;
  if (!on_device(d, n)) return INVALID_VALUE;
  later(s, [=] { memcpy(h, reinterpret_cast<void*>(d), n); });
  if (!is_pinned(h, n)) pump([&] { return s->work.empty(); });
  return OK;
}
API cuMemcpyDtoDAsync_v2(ptr d, ptr from, size_t n, void* stream) {
  BEGIN_IN(cuMemcpyDtoDAsync_v2);
  auto* s = known(stream);
  if (!s) return INVALID_HANDLE;
  if (!on_device(d, n) || !on_device(from, n)) return INVALID_VALUE;
  later(s, [=] { memmove(reinterpret_cast<void*>(d), reinterpret_cast<void*>(from), n); });
  return OK;
}
// The image of the stand-in for NVRTC: the texts must be those that g++ compiled.
API cuModuleLoadData(void** m, const void* image) {
  BEGIN_IN(cuModuleLoadData);
  const char* at = static_cast<const char*>(image);
  if (strncmp(at, "TESSERA EMU\n", 12) != 0) return INVALID_IMAGE;
  at += 12;
  auto* module = new Module;
  while (*at) {
    const char* line = strchr(at, '\n');
    const char* space = line;
    while (space > at && *space != ' ') --space;
    const std::string name(at, space);
    const size_t bytes = strtoull(space, nullptr, 10);
    at = line + 1;
    bool same = false;
    for (const auto& text : texts())
      same |= text.name == name && size_t(text.end - text.begin) == bytes && memcmp(text.begin, at, bytes) == 0;
    if (!same) {
      fprintf(stderr, "libcuda stand-in: it was not built from this text of %s: run tests/emu/build.sh\n", name.c_str());
      delete module;
      return NO_BINARY_FOR_GPU;
    }
    module->source = name;
    at += bytes;
  }
  state().modules.insert(module);
  *m = module;
  return OK;
}
API cuModuleUnload(void* m) {
  BEGIN_IN(cuModuleUnload);
  auto* module = static_cast<Module*>(m);
  if (!state().modules.erase(module)) return INVALID_HANDLE;
  delete module;
  return OK;
}
API cuModuleGetFunction(void** f, void* m, const char* name) {
  BEGIN_IN(cuModuleGetFunction);
  auto* module = static_cast<Module*>(m);
  if (!state().modules.count(module)) return INVALID_HANDLE;
  auto it = kernels().find({module->source, name});
  if (it == kernels().end()) return NOT_FOUND;
  *f = &it->second;
  return OK;
}
API cuFuncGetParamInfo(void* f, size_t i, size_t* offset, size_t* bytes) {
  BEGIN_IN(cuFuncGetParamInfo);
  auto* kernel = static_cast<emu::Kernel*>(f);
  if (i >= kernel->argument_bytes.size()) return INVALID_VALUE;
  *offset = kernel->argument_offsets[i];
  *bytes = kernel->argument_bytes[i];
  return OK;
}
API cuFuncSetAttribute(void* f, int attribute, int value) {
  BEGIN_IN(cuFuncSetAttribute);
  if (attribute != 8 || value < 0 || value > 227 << 10) return INVALID_VALUE;
  static_cast<emu::Kernel*>(f)->shared_bytes_max = unsigned(value);
  return OK;
}
API cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
                   void* stream, void** arguments, void**) {
  BEGIN_IN(cuLaunchKernel);
  auto* s = known(stream);
  if (!s) return INVALID_HANDLE;
  auto* kernel = static_cast<emu::Kernel*>(f);
  const size_t threads = size_t(bx) * by * bz;
  if (!gx || !gy || !gz || gx > 0x7fffffffu || gy > 65535 || gz > 65535) return INVALID_VALUE;
  if (!threads || threads > host_cuda::THREADS_MAX || bz > 64 || smem > kernel->shared_bytes_max) return INVALID_VALUE;
  later(s, kernel->bind(dim3(gx, gy, gz), dim3(bx, by, bz), smem, arguments));
  return OK;
}
// What stand-ins for other libraries need: their own work on a stream, and whether memory is the device's.
API tessera_emu_later(void* stream, void (*run)(void*), void* data) {
  BEGIN_IN(tessera_emu_later);
  auto* s = known(stream);
  if (!s) return INVALID_HANDLE;
  later(s, [=] { run(data); });
  return OK;
}
__attribute__((visibility("default"))) int tessera_emu_on_device(const void* at, size_t bytes) {
  std::lock_guard guard(state().lock);
  return on_device(ptr(uintptr_t(at)), bytes);
}
}
