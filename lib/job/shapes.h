// Named shapes: drafters of known sizes with the row they are trained on. For planning and benchmarks, without a target or a store.
#pragma once

#include <string>

#include "model/drafter_config.h"

namespace dspark::job {

struct Shape {
  std::string name;
  model::DrafterConfig config;
  int64_t row_tokens = 0;  // of a packed row
  int64_t anchors = 0;     // blocks in it
};

// tiny, small, qwen3-0.6b, qwen3-8b, kimi-k3; or a drafter's config.json (or its folder), which is given `row_tokens` and `anchors`.
// An unknown name is wrong usage, said with the names there are.
Shape find_shape(const std::string& name_or_file, int64_t row_tokens = 1024, int64_t anchors = 512);
// The same with a row of `tokens` and `anchors` (0: the shape's) to measure. Throws when they do not fit each other.
Shape measured_shape(const std::string& name_or_file, int64_t tokens, int64_t anchors);
std::string shape_names();

}  // namespace dspark::job
