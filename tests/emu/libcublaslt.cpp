// A stand-in for cuBLASLt: what this workspace calls of it, by plain loops in a fixed order, with
// sums in f64. Products are queued on the streams of the stand-in for libcuda and read and write
// memory when their turn comes. For tests only.
//
// It refuses what the library would (descriptors that do not fit one another, an algorithm of
// another problem, too small a workspace), and ends the process where the library would read or
// write what it must not: memory that is not the device's, misaligned matrices, an output that
// overlaps a factor, a workspace of two streams.
//
//   TESSERA_EMU_CUBLASLT   whole     all epilogues, and ReLU keeps NaN
//                          plain     no algorithm has an epilogue
//                          nan       ReLU makes 0 of NaN
//                          by default, one of them by TESSERA_EMU_SEED
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

// Of the stand-in for libcuda.
extern "C" int tessera_emu_later(void* stream, void (*run)(void*), void* data);
extern "C" int tessera_emu_on_device(const void* at, size_t bytes);

namespace {
enum { OK = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { R_32F = 0, COMPUTE_32F = 68, FAST_TF32 = 77 };
enum { NONE = 1, BIAS = 4, RELU_BIAS = 6 };
constexpr uint64_t ALGORITHM = 0x7465737365726131;

enum class Mode { whole, plain, nan };
Mode mode() {
  static const Mode m = [] {
    const char* text = getenv("TESSERA_EMU_CUBLASLT");
    const std::string name = text ? text : "";
    const char* seed = getenv("TESSERA_EMU_SEED");
    if (name.empty()) return Mode((seed ? strtoull(seed, nullptr, 10) + 2 : 0) % 3);
    return name == "plain" ? Mode::plain : name == "nan" ? Mode::nan : Mode::whole;
  }();
  return m;
}
[[noreturn]] void die(const char* why) {
  fprintf(stderr, "cuBLASLt stand-in: %s\n", why);
  abort();
}

struct Handle {
  uint64_t magic = ALGORITHM;
  std::map<void*, void*> workspaces;  // and the stream of each
};
struct Operation {
  int compute, transpose[2] = {0, 0};
  int epilogue = NONE;
  const float* bias = nullptr;
};
struct Layout {
  uint64_t rows, cols;
  int64_t stride;
};
struct Preference {
  uint64_t workspace_bytes = 0;
  uint32_t reductions = 7;
  uint32_t aligns[4] = {256, 256, 256, 256};
};
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

// Sizes of a problem, if its descriptors fit one another.
struct Sizes {
  uint64_t m, n, k;
};
bool sizes(const Operation& op, const Layout& a, const Layout& b, const Layout& c, const Layout& d, Sizes& out) {
  for (const auto* l : {&a, &b, &c, &d})
    if (!l->rows || !l->cols || l->stride < int64_t(l->rows)) return false;
  const uint64_t am = op.transpose[0] ? a.cols : a.rows, ak = op.transpose[0] ? a.rows : a.cols;
  const uint64_t bk = op.transpose[1] ? b.cols : b.rows, bn = op.transpose[1] ? b.rows : b.cols;
  out = {am, bn, ak};
  return ak == bk && d.rows == am && d.cols == bn && c.rows == d.rows && c.cols == d.cols;
}
uint64_t hash(const Operation& op, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  uint64_t h = 1469598103934665603ull;
  auto add = [&](uint64_t x) { h = (h ^ x) * 1099511628211ull; };
  for (int x : {op.compute, op.transpose[0], op.transpose[1], op.epilogue}) add(uint64_t(x));
  for (const auto* l : {&a, &b, &c, &d}) {
    add(l->rows);
    add(l->cols);
    add(uint64_t(l->stride));
  }
  return h;
}
size_t span_bytes(const Layout& l) { return size_t((l.cols - 1) * uint64_t(l.stride) + l.rows) * sizeof(float); }
bool overlap(const void* p, size_t p_bytes, const void* q, size_t q_bytes) {
  auto a = uintptr_t(p), b = uintptr_t(q);
  return a < b + q_bytes && b < a + p_bytes;
}

// A factor as the tensor cores see it.
float rounded(float x, int compute) {
  if (compute != FAST_TF32 || !std::isfinite(x)) return x;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
  memcpy(&x, &bits, 4);
  return x;
}

struct Job {
  Operation op;
  Sizes size;
  float alpha, beta;
  const float *a, *b, *c;
  float* d;
  Layout al, bl, cl, dl;
  char* workspace;
  size_t workspace_bytes;
  Mode mode;
};
void compute(const Job& job) {
  // Who shares a workspace finds it changed.
  memset(job.workspace, 0x5a, job.workspace_bytes);
  for (uint64_t n = 0; n < job.size.n; ++n)
    for (uint64_t m = 0; m < job.size.m; ++m) {
      double sum = 0;
      for (uint64_t k = 0; k < job.size.k; ++k) {
        const float a = job.a[job.op.transpose[0] ? m * job.al.stride + k : k * job.al.stride + m];
        const float b = job.b[job.op.transpose[1] ? k * job.bl.stride + n : n * job.bl.stride + k];
        sum += double(rounded(a, job.op.compute)) * double(rounded(b, job.op.compute));
      }
      float value = float(sum) * job.alpha;
      if (job.beta != 0) value += job.beta * job.c[n * job.cl.stride + m];
      if (job.op.epilogue != NONE) value += job.op.bias[m];
      if (job.op.epilogue == RELU_BIAS) value = job.mode == Mode::nan ? (value > 0 ? value : 0.0f) : (value < 0 ? 0.0f : value);
      job.d[n * job.dl.stride + m] = value;
    }
}
}  // namespace

extern "C" {
size_t cublasLtGetVersion() { return 120804; }
const char* cublasLtGetStatusString(int status) {
  switch (status) {
    case OK: return "the operation completed successfully";
    case NOT_INITIALIZED: return "the library was not initialized";
    case INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case EXECUTION_FAILED: return "the function failed to launch on the GPU";
    case NOT_SUPPORTED: return "the functionality requested is not supported";
    default: return "unknown";
  }
}
int cublasLtCreate(Handle** handle) {
  if (!handle) return INVALID_VALUE;
  *handle = new Handle;
  return OK;
}
int cublasLtDestroy(Handle* handle) {
  if (!handle || handle->magic != ALGORITHM) return NOT_INITIALIZED;
  delete handle;
  return OK;
}
int cublasLtMatmulDescCreate(Operation** made, int compute, int scale) {
  if (!made || (compute != COMPUTE_32F && compute != FAST_TF32) || scale != R_32F) return INVALID_VALUE;
  *made = new Operation{compute};
  return OK;
}
int cublasLtMatmulDescDestroy(Operation* op) {
  delete op;
  return OK;
}
int cublasLtMatmulDescSetAttribute(Operation* op, int attribute, const void* value, size_t bytes) {
  if (!op || !value) return INVALID_VALUE;
  int number = 0;
  if (attribute != 8) {
    if (bytes != sizeof number) return INVALID_VALUE;
    memcpy(&number, value, bytes);
  }
  switch (attribute) {
    case 3:
    case 4:
      if (number != 0 && number != 1) return INVALID_VALUE;
      op->transpose[attribute - 3] = number;
      return OK;
    case 7:
      if (number != NONE && number != BIAS && number != RELU_BIAS) return INVALID_VALUE;
      op->epilogue = number;
      return OK;
    case 8:
      if (bytes != sizeof op->bias) return INVALID_VALUE;
      memcpy(&op->bias, value, bytes);
      return OK;
    default: return INVALID_VALUE;
  }
}
int cublasLtMatrixLayoutCreate(Layout** made, int type, uint64_t rows, uint64_t cols, int64_t stride) {
  if (!made || type != R_32F) return INVALID_VALUE;
  *made = new Layout{rows, cols, stride};
  return OK;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return OK;
}
int cublasLtMatmulPreferenceCreate(Preference** made) {
  if (!made) return INVALID_VALUE;
  *made = new Preference;
  return OK;
}
int cublasLtMatmulPreferenceDestroy(Preference* preference) {
  delete preference;
  return OK;
}
int cublasLtMatmulPreferenceSetAttribute(Preference* p, int attribute, const void* value, size_t bytes) {
  if (!p || !value) return INVALID_VALUE;
  if (attribute == 1) {
    if (bytes != 8) return INVALID_VALUE;
    memcpy(&p->workspace_bytes, value, 8);
    return OK;
  }
  if (bytes != 4) return INVALID_VALUE;
  if (attribute == 3) {
    memcpy(&p->reductions, value, 4);
    return OK;
  }
  if (attribute < 5 || attribute > 8) return INVALID_VALUE;
  memcpy(&p->aligns[attribute - 5], value, 4);
  return OK;
}
// An algorithm is: a mark, the problem's hash, its workspace, and how A, B, C and D must be aligned.
int cublasLtMatmulAlgoGetHeuristic(Handle* handle, Operation* op, Layout* a, Layout* b, Layout* c, Layout* d,
                                   Preference* wishes, int wanted, Heuristic* found, int* count) {
  if (!handle || handle->magic != ALGORITHM) return NOT_INITIALIZED;
  if (!op || !a || !b || !c || !d || !wishes || wanted < 1 || !found || !count) return INVALID_VALUE;
  *count = 0;
  Sizes size;
  if (!sizes(*op, *a, *b, *c, *d, size)) return INVALID_VALUE;
  if (op->epilogue != NONE && mode() == Mode::plain) return NOT_SUPPORTED;
  if (wishes->reductions & 1) die("sums in place have no fixed order");
  // Long sums are split, as far as the workspace goes.
  const size_t split = size.k >= 4 * size.m ? size_t(64) << 10 : 0;
  const size_t workspace = split <= wishes->workspace_bytes ? split : 0;
  memset(found, 0, sizeof *found);
  uint64_t* data = found->algorithm.data;
  data[0] = ALGORITHM;
  data[1] = hash(*op, *a, *b, *c, *d);
  data[2] = workspace;
  memcpy(data + 3, wishes->aligns, sizeof wishes->aligns);
  found->workspace_bytes = workspace;
  found->waves = 1;
  *count = 1;
  return OK;
}
int cublasLtMatmul(Handle* handle, Operation* op, const float* alpha, const void* a, Layout* al, const void* b,
                   Layout* bl, const float* beta, const void* c, Layout* cl, void* d, Layout* dl,
                   const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
  if (!handle || handle->magic != ALGORITHM) return NOT_INITIALIZED;
  if (!op || !alpha || !beta || !al || !bl || !cl || !dl || !algorithm) return INVALID_VALUE;
  Sizes size;
  if (!sizes(*op, *al, *bl, *cl, *dl, size)) return INVALID_VALUE;
  const uint64_t* data = algorithm->data;
  if (data[0] != ALGORITHM || data[1] != hash(*op, *al, *bl, *cl, *dl)) return NOT_SUPPORTED;
  if (workspace_bytes < data[2] || uintptr_t(workspace) % 256) return INVALID_VALUE;
  if (op->epilogue != NONE && !op->bias) return INVALID_VALUE;
  uint32_t aligns[4];
  memcpy(aligns, data + 3, sizeof aligns);
  const void* places[] = {a, b, c, d};
  const Layout* layouts[] = {al, bl, cl, dl};
  for (int i = 0; i < 4; ++i) {
    if (!tessera_emu_on_device(places[i], span_bytes(*layouts[i]))) die("a matrix does not lie in memory of the device");
    if (uintptr_t(places[i]) % aligns[i]) die("a matrix is less aligned than the algorithm was chosen for");
  }
  if (data[2] && !tessera_emu_on_device(workspace, workspace_bytes)) die("the workspace is not memory of the device");
  if (handle->workspaces.emplace(workspace, stream).first->second != stream) die("two streams share a workspace");
  if (op->epilogue != NONE) {
    if (!tessera_emu_on_device(op->bias, size.m * sizeof(float))) die("the bias does not lie in memory of the device");
    if (uintptr_t(op->bias) % 16) die("the bias is misaligned");
  }
  if (overlap(a, span_bytes(*al), d, span_bytes(*dl)) || overlap(b, span_bytes(*bl), d, span_bytes(*dl)))
    die("the output overlaps a factor");
  auto* job = new Job{*op,  size, *alpha, *beta, static_cast<const float*>(a), static_cast<const float*>(b), static_cast<const float*>(c), static_cast<float*>(d), *al, *bl, *cl, *dl, static_cast<char*>(workspace), size_t(data[2]), mode()};
  auto run = [](void* data) {
    std::unique_ptr<Job> job(static_cast<Job*>(data));
    compute(*job);
  };
  return tessera_emu_later(stream, run, job) == 0 ? OK : EXECUTION_FAILED;
}
}
