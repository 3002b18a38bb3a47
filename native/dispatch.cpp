// Detects the instruction sets of the machine and holds the kernels in use.
#include "dispatch.hpp"

#include <atomic>
#include <stdexcept>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace attendless {

// isa.cpp, compiled once per name, defines these.
#define DECLARE(isa) \
  namespace isa {    \
  extern const Kernels kernels; \
  }
DECLARE(portable)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512bf16)
DECLARE(wide)
DECLARE(armv86)
#undef DECLARE

namespace {

// The instruction sets of this machine, fastest first. `wide` is the AVX-512 source lowered to pairs of AVX2 vectors.
// It is slower than avx2 and tests that code on machines without AVX-512. Only test builds have it; it is never the
// default.
std::vector<const Kernels*> available() {
  std::vector<const Kernels*> sets;
#if defined(__x86_64__)
  __builtin_cpu_init();
  [[maybe_unused]] const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if defined(ATTENDLESS_HAS_ARMV86) && defined(__linux__)
  constexpr unsigned long kI8mm = 1ul << 13, kBf16 = 1ul << 14;  // HWCAP2_I8MM and HWCAP2_BF16 of Linux
  const unsigned long found = getauxval(AT_HWCAP2);
  if ((found & kI8mm) && (found & kBf16)) sets.push_back(&armv86::kernels);
#endif
#if defined(ATTENDLESS_HAS_AVX512BF16)
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    sets.push_back(&avx512bf16::kernels);
  }
#endif
#if defined(ATTENDLESS_HAS_AVX512)
  if (has_avx2 && __builtin_cpu_supports("avx512f")) sets.push_back(&avx512::kernels);
#endif
#if defined(ATTENDLESS_HAS_AVX2)
  if (has_avx2) sets.push_back(&avx2::kernels);
#endif
  sets.push_back(&portable::kernels);
#if defined(ATTENDLESS_HAS_WIDE)
  if (has_avx2) sets.push_back(&wide::kernels);
#endif
  return sets;
}

std::atomic<const Kernels*> used{available().front()};

}  // namespace

const Kernels& kernels() { return *used.load(); }

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* set : available()) names.emplace_back(set->name);
  return names;
}

void use_isa(const std::string& name) {
  std::string exist;
  for (const Kernels* set : available()) {
    if (name == set->name) return used.store(set);
    exist += std::string(exist.empty() ? "" : ", ") + set->name;
  }
  throw std::invalid_argument("unknown instruction set '" + name + "'. There are: " + exist);
}

}  // namespace attendless
