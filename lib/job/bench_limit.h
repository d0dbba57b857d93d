// What a device could do at most: what benchmarks and training runs are compared with.
//
// The CPU is measured. A GPU that the named machines know (job/machines.h) is taken at its data sheet, as FLOP utilisation is usually
// counted; of another one the limits are what one large product and one large copy reach.
#pragma once

#include <string>

#include "core/threads.h"
#include "model/backends.h"

namespace dspark::job {

struct MatrixLimit {
  double flops = 0;  // a second
  std::string how;   // "its data sheet"
};
// Of products in the backend's act dtype. On the CPU: the named kernel's multiply-adds on registers, 30 ms of each thread's own time, so
// that it hardly matters what else the machine does in that moment.
MatrixLimit measure_matrix_limit(model::Backend& backend, const std::string& cpu_kernel, int threads);

// Bytes read and written a second by work on large tensors. On the CPU by the pool's threads: call it beside what is compared with it,
// several times, and keep the best.
double measure_memory_limit(model::Backend& backend, ThreadPool& pool);

// Whose numbers these are: "AMD EPYC 9B45, 2 threads", or what a GPU says it is.
std::string device_text(model::Backend& backend, int threads);

inline bool is_cpu(model::Backend& backend) { return backend.context().device().name() == "cpu"; }

}  // namespace dspark::job
