// Selects the kernels to run: by default those of the fastest instruction set of the machine.
#pragma once

#include <string>
#include <vector>

#include "kernels.hpp"

namespace attendless {

const Kernels& kernels();               // the kernels in use
std::vector<std::string> isas();        // the instruction sets of this machine, fastest first
void use_isa(const std::string& name);  // throws std::invalid_argument if the machine or the build lacks `name`

}  // namespace attendless
