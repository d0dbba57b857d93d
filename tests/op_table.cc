#include "op_table.h"

namespace dspark::test {

const OpCases& op_cases() {
  static const OpCases cases = [] {
    OpCases c;
    add_moving_cases(c);
    add_product_cases(c);
    add_norm_cases(c);
    add_markov_cases(c);
    add_attention_cases(c);
    add_loss_cases(c);
    add_optimizer_cases(c);
    add_decoding_cases(c);
    return c;
  }();
  return cases;
}

}  // namespace dspark::test
