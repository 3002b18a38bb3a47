// Which unit runs: the best this machine has, or the one a test asks for.
#pragma once

#include <string>
#include <vector>

#include "kernels.hpp"

namespace attendless {

const Kernels& kernels();                 // the unit in use
std::vector<std::string> paths();         // units this machine can run, best first
void use_path(const std::string& name);   // throws std::invalid_argument if there is no such path here

}  // namespace attendless
