// The CPU kernels by name, as `--cpu-kernel` takes them.
#pragma once

#include <string>
#include <vector>

namespace dspark::model {

// All that this program has, whatever this CPU runs (that is cpu_kernel_names() in model/backends.h).
std::vector<std::string> all_cpu_kernel_names();

}  // namespace dspark::model
