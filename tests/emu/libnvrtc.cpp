// A stand-in for NVRTC: "compiles" a source into a list of its texts, from which the stand-in for
// libcuda finds the kernels that g++ compiled from the same texts. It refuses what NVRTC would: a
// missing architecture, unknown options, #error.
//
//   image   "TESSERA EMU\n", then for each text "NAME LENGTH\n" and the text; the source is the last
//
// TESSERA_EMU_NVRTC_OLD=1 knows compute capability 8.0 only.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {
struct Program {
  std::string image, log;
  std::string text;
};
enum { OK = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };
void append(std::string& image, const std::string& name, const std::string& text) {
  image += name + " " + std::to_string(text.size()) + "\n" + text;
}
std::vector<int> known() {
  const char* old = getenv("TESSERA_EMU_NVRTC_OLD");
  return old && *old == '1' ? std::vector<int>{80} : std::vector<int>{75, 80, 86, 89, 90, 100, 120};
}
}  // namespace

extern "C" {
int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 8;
  return OK;
}
int nvrtcGetNumSupportedArchs(int* n) {
  *n = int(known().size());
  return OK;
}
int nvrtcGetSupportedArchs(int* archs) {
  for (int arch : known()) *archs++ = arch;
  return OK;
}
int nvrtcCreateProgram(Program** program, const char* text, const char* name, int count, const char* const* headers,
                       const char* const* names) {
  if (!program || !text || count < 0) return INVALID_INPUT;
  *program = new Program;
  auto& image = (*program)->image;
  image = "TESSERA EMU\n";
  for (int i = 0; i < count; ++i) append(image, names[i], headers[i]);
  append(image, name ? name : "default_program", text);
  (*program)->text = text;
  return OK;
}
int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  if (!program) return INVALID_PROGRAM;
  bool architecture = false;
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    architecture |= option.rfind("--gpu-architecture=", 0) == 0;
    bool fine = option.rfind("--gpu-architecture=", 0) == 0;
    for (const char* known : {"--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"})
      fine |= option == known;
    if (!fine) {
      program->log = "nvrtc stand-in: option " + option + " is not one that the tests know\n";
      return INVALID_OPTION;
    }
  }
  if (!architecture) {
    program->log = "nvrtc stand-in: no architecture was given\n";
    return INVALID_OPTION;
  }
  const auto at = program->text.find("#error");
  if (at != std::string::npos) {
    program->log = "error: " + program->text.substr(at, program->text.find('\n', at) - at) + "\n";
    return COMPILATION;
  }
  return OK;
}
int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  *bytes = program->image.size();
  return OK;
}
int nvrtcGetCUBIN(Program* program, char* image) {
  memcpy(image, program->image.data(), program->image.size());
  return OK;
}
int nvrtcGetPTXSize(Program* program, size_t* bytes) {
  *bytes = program->image.size() + 1;
  return OK;
}
int nvrtcGetPTX(Program* program, char* image) {
  memcpy(image, program->image.c_str(), program->image.size() + 1);
  return OK;
}
int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  *bytes = program->log.size() + 1;
  return OK;
}
int nvrtcGetProgramLog(Program* program, char* log) {
  memcpy(log, program->log.c_str(), program->log.size() + 1);
  return OK;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return OK;
}
const char* nvrtcGetErrorString(int result) {
  switch (result) {
    case OK: return "NVRTC_SUCCESS";
    case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
    case COMPILATION: return "NVRTC_ERROR_COMPILATION";
    default: return "NVRTC_ERROR unknown";
  }
}
}
