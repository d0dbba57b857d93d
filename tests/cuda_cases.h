// What the cuda backend is checked with beside the table of operators, on the emulation (test_cuda_*.cc) and on a GPU (on_device/).
#pragma once

#include <string>

#include "golden_train_check.h"
#include "op_table.h"

namespace dspark::test {

// What the table's small and odd shapes do not reach: rows of whole 16-byte accesses, several of a thread's chunks in a row, more
// rows than a block sums at once, heads that fill more than one block.
OpCases wide_cases();

// Every choice that sampling makes, with the numbers a run draws: ids and decisions must be the cpu backend's, not only close.
void check_choices(model::Context& cuda);

// Of a drafter_step or trajectory case with this description. bf16 gradients may be three times as far off as the public trainers' own.
golden::Tolerance cuda_tolerance(const std::string& device, model::Precision precision, const Json& description);

}  // namespace dspark::test
