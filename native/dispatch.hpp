// Which instruction set's kernels run: the best this machine has, or those a test asks for.
#pragma once

#include <string>
#include <vector>

#include "kernels.hpp"

namespace attendless {

const Kernels& kernels();               // those in use
std::vector<std::string> isas();        // instruction sets this machine can run, best first
void use_isa(const std::string& name);  // throws std::invalid_argument if there is no such thing here

}  // namespace attendless
