// What the kernels' translation units tell the stand-in for libcuda.
#pragma once
#include <functional>
#include <string>

#include "cuda_on_host.hpp"

namespace emu {
// A launch whose arguments were copied, as the driver does when it queues one.
using Bind = std::function<void()> (*)(dim3, dim3, size_t, void**);
struct Kernel {
  std::string source, name;
  Bind bind;
  std::vector<size_t> argument_bytes, argument_offsets;
  unsigned shared_bytes_max = 48 << 10;
};
struct Text {
  std::string name;  // of the file, without its folder
  const char* begin;
  const char* end;
};
void add(Kernel kernel);
void add(Text text);

template <class... A, size_t... I>
std::tuple<std::remove_const_t<A>...> copy_args(void (*)(A...), void** p, std::index_sequence<I...>) {
  return {*static_cast<A*>(p[I])...};
}
template <auto F, class... A>
std::function<void()> bind_as(void (*f)(A...), dim3 g, dim3 b, size_t smem, void** p) {
  auto args = copy_args(f, p, std::index_sequence_for<A...>{});
  return [=] { host_cuda::launch(g, b, smem, [&] { std::apply(F, args); }); };
}
template <auto F>
std::function<void()> bind(dim3 g, dim3 b, size_t smem, void** p) {
  return bind_as<F>(F, g, b, smem, p);
}
template <class... A>
void describe(Kernel& kernel, void (*)(A...)) {
  kernel.argument_bytes = {sizeof(A)...};
  size_t at = 0;
  for (auto [bytes, align] : {std::pair<size_t, size_t>(sizeof(A), alignof(A))..., std::pair<size_t, size_t>(0, 1)}) {
    at = (at + align - 1) / align * align;
    kernel.argument_offsets.push_back(at);
    at += bytes;
  }
}
struct AddKernel {
  template <class F>
  AddKernel(const char* source, const char* name, Bind bind, F* f) {
    Kernel kernel{source, name, bind, {}, {}};
    describe(kernel, f);
    add(std::move(kernel));
  }
};
struct AddText {
  AddText(const char* name, const char* begin, const char* end) { add(Text{name, begin, end}); }
};
}  // namespace emu

#define EMU_KERNEL(source, k) static emu::AddKernel add_##k(source, #k, &emu::bind<&k>, &k);
// The text of a file, as it was when its kernels were compiled.
#define EMU_TEXT(symbol, name, path)                                                         \
  asm(".section .rodata\n" #symbol "_begin:\n.incbin \"" path "\"\n" #symbol "_end:\n.byte 0\n.text\n"); \
  extern "C" __attribute__((visibility("hidden"))) const char symbol##_begin[], symbol##_end[];          \
  static emu::AddText add_##symbol(name, symbol##_begin, symbol##_end);
