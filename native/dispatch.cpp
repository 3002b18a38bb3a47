#include "dispatch.hpp"

#include <atomic>
#include <stdexcept>

namespace attendless {

// Each defined in unit.cpp, compiled once per name.
namespace portable {
extern const Kernels kernels;
}
#if defined(ATTENDLESS_X86)
namespace avx2 {
extern const Kernels kernels;
}
namespace wide {
extern const Kernels kernels;
}
#endif
#if defined(ATTENDLESS_AVX512)
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

// Best first. `wide` is avx512's source, lowered to pairs of AVX2 vectors: slower than avx2, it lets machines without
// AVX-512 test that code, and is never chosen by itself.
std::vector<const Kernels*> available() {
  std::vector<const Kernels*> units;
#if defined(ATTENDLESS_X86)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if defined(ATTENDLESS_AVX512)
  if (has_avx2 && __builtin_cpu_supports("avx512f")) units.push_back(&avx512::kernels);
#endif
  if (has_avx2) units.push_back(&avx2::kernels);
#endif
  units.push_back(&portable::kernels);
#if defined(ATTENDLESS_X86)
  if (has_avx2) units.push_back(&wide::kernels);
#endif
  return units;
}

std::atomic<const Kernels*> used{available().front()};

}  // namespace

const Kernels& kernels() { return *used.load(); }

std::vector<std::string> paths() {
  std::vector<std::string> names;
  for (const Kernels* unit : available()) names.emplace_back(unit->name);
  return names;
}

void use_path(const std::string& name) {
  std::string exist;
  for (const Kernels* unit : available()) {
    if (name == unit->name) return used.store(unit);
    exist += std::string(exist.empty() ? "" : ", ") + unit->name;
  }
  throw std::invalid_argument("unknown instruction path '" + name + "'. There are: " + exist);
}

}  // namespace attendless
