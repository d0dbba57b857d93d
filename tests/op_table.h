// The table of operator cases: one list that drives every backend (tests/test_ops.cc). Cases hold shapes and data,
// nothing that knows a backend. Hostile by default: sizes 0, 1, odd, one over a tile, documents that meet inside a
// block.
#pragma once

#include <vector>

#include "op_run.h"

namespace dspark::test {

using OpCases = std::vector<OpCase>;

void add_moving_cases(OpCases& cases);
void add_product_cases(OpCases& cases);
void add_norm_cases(OpCases& cases);
void add_markov_cases(OpCases& cases);
void add_attention_cases(OpCases& cases);
void add_loss_cases(OpCases& cases);
void add_optimizer_cases(OpCases& cases);
void add_decoding_cases(OpCases& cases);

const OpCases& op_cases();

}  // namespace dspark::test
