// Benchmark of a drafter's matrix products on any device, through the operators: each weight's in a training step (y = x W^T, its input
// and its weight gradient, the loss head's too, at the most rows a step multiplies), and the head's with the few rows of decoding.
//
// Protocol: normal random operands (zeros are faster on some devices), one call to warm up, then repeats, short ones several at once,
// by the device's clock; the value is their median. The limit (job/bench_limit.h) is measured before them; of one and of eight rows,
// whose time is reading the weight, it is the memory's.
#pragma once

#include <string>
#include <vector>

#include "job/bench_result.h"
#include "job/shapes.h"
#include "model/backends.h"

namespace dspark::job {

// Each weight's products in a training step once, at the most rows a step multiplies; of a weight gradient ("tn") the rows are k.
// `input_gradients`: apart from a forward product of the same sizes.
std::vector<model::PlanProduct> step_products(const Shape& shape, model::Precision precision, bool input_gradients);

struct BenchProductsOptions {
  std::string shape = "small", precision = "bf16", kernel = "auto", device = "auto";
  int64_t tokens = 0, anchors = 0;  // 0: the shape's
  int threads = 0, repeats = 5;
  double seconds_per_product = 0.5;
  bool large = false;  // a product of 4096 x 2560 x 2560 first: what a kernel reaches when nothing is in its way
};

std::vector<BenchResult> bench_products(const BenchProductsOptions& options);

}  // namespace dspark::job
