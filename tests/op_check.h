// What the table of operator cases asks of a backend.
//
// Tolerance of a comparison with ref fp64. All inputs are exact in every dtype, so what differs is rounding inside the
// operator. The yardstick is how far the fp64 result moves when every random input moves by a relative noise of 2^-8
// (bf16: what rounding an operand does at most) or 2^-20 (fp32: 16 ulp, which leaves room for sums of some thousand
// terms, whose rounding errors grow like sqrt(n) ulp); acc inputs get the fp32 noise on every backend. The largest move
// of six draws in the same row (or a quarter of the largest of the whole tensor, if more) times 4, plus the rounding of
// the result itself: half an ulp of bf16 or 2^-22 of fp32. So the bound is what a plain version with rounded operands
// does to the same row, four times.
#pragma once

#include <memory>

#include "model/backends.h"
#include "op_table.h"

namespace dspark::test {

std::unique_ptr<model::Backend> ref_backend(model::Precision precision);

// Runs the table (or other cases) on `backend`, contiguous and strided, and compares with ref fp64.
void run_table(model::Backend& backend, const OpCases& cases = op_cases());
// Two runs of everything give the same bits, on one backend or two.
void same_bits_on(model::Context& first, model::Context& second);
// Each row unit alone, and the halves, give the bits of the whole.
void rows_alone(model::Context& ctx);

}  // namespace dspark::test
