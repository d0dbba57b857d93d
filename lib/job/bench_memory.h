// The rate at which this machine moves memory that no cache holds: the limit of element-wise work on large tensors.
#pragma once

#include "core/threads.h"

namespace dspark::job {

// Bytes read and written a second by all threads: the best of reading, copying and updating in place (y += x), each measured once on
// 128 MiB. Call it beside what it is compared with, several times, and keep the best.
double memory_bytes_per_s(ThreadPool& pool);

}  // namespace dspark::job
