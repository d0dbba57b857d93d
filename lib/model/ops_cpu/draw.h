// Drawing from unnormalised weights; shared by the sampling operators.
#pragma once

#include <cstdint>

namespace dspark::model::cpu {

// The first index whose running sum (in fp64, in order) exceeds uniform times the total.
int64_t draw(const float* weights, int64_t n, double uniform);

}  // namespace dspark::model::cpu
