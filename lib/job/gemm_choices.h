// Measured choices of the matrix kernel: the file that `bench gemm --save` writes, and what a run does with it and with a GPU's own.
//
// Which kernel makes a product is part of a run's bits. A choice therefore depends on a weight's shape alone, never on how many rows
// are multiplied with it. On the CPU nothing is measured when a run starts: it takes the table it is given (--gemm-table) or none. On a
// GPU a new run measures the library's kernels before its first step. Both write what they use into state.json, and resume with the
// same, whatever table lies around then and whatever another measurement would say.
//
//   {"what": "dspark gemm table", "format_version": "1.0", "cpu": "AMD EPYC 9654", "default": "avx512bf16",
//    "choices": [{"form": "packed", "type": "bf16", "n": 960, "k": 576, "kernel": "avx512bf16", "gflops": {"avx512": 201.5, ...}}, ...]}
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/files.h"
#include "core/json.h"
#include "job/common.h"
#include "model/collectives.h"

namespace dspark::job {

// Throws with file and entry for what is no such table, and for kernels that this CPU does not have.
std::vector<model::GemmChoice> read_gemm_table(const fs::path& file);

// As a run's state holds them.
OrderedJson kernels_json(const model::Backend& backend);
// Before a new run's first step: the first rank chooses by measuring what `rehearse` enqueues, and all take its choices. All ranks together.
void choose_kernels(model::Backend& backend, model::Collectives& ranks, const std::function<void()>& rehearse);
// Before a backend is made: a run that is in `out` goes on with the device and the kernels it began with. An Error when the options
// name others, or when this CPU does not have them.
void adopt_kernels(CommonOptions& options, const fs::path& out);

}  // namespace dspark::job
