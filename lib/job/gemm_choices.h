// Measured choices of the matrix kernel: the file that `bench gemm --save` writes, and what a run does with it.
//
// Which kernel makes a product is part of a run's bits. A choice therefore depends on a weight's shape alone, never on how many rows
// are multiplied with it, and nothing is measured when a run starts: it takes the table it is given (--gemm-table) or none, writes
// what it used into state.json, and resumes with the same, whatever table lies around then.
//
//   {"what": "dspark gemm table", "format_version": "1.0", "cpu": "AMD EPYC 9654", "default": "avx512bf16",
//    "choices": [{"form": "packed", "type": "bf16", "n": 960, "k": 576, "kernel": "avx512bf16", "gflops": {"avx512": 201.5, ...}}, ...]}
#pragma once

#include <string>
#include <vector>

#include "core/files.h"
#include "core/json.h"
#include "job/common.h"

namespace dspark::job {

// Throws with file and entry for what is no such table, and for kernels that this CPU does not have.
std::vector<model::GemmChoice> read_gemm_table(const fs::path& file);

// As a run's state holds them.
OrderedJson kernels_json(const model::Backend& backend);
// Before a backend is made: a run that is in `out` goes on with the device and the kernels it began with. An Error when the options
// name others, or when this CPU does not have them.
void adopt_kernels(CommonOptions& options, const fs::path& out);

}  // namespace dspark::job
