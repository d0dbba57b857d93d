// A target in a test: loaded on a backend, and run over sequences cut into calls in any way.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/backends.h"
#include "target/target_files.h"
#include "target/target_model.h"

namespace dspark::test {

struct LoadedTarget {
  target::TargetFiles files;
  std::unique_ptr<model::Backend> backend;
  std::unique_ptr<target::TargetModel> decoder;  // goes before its backend
  bool fp32;

  LoadedTarget(const fs::path& path, model::Precision precision, int threads = 0);
  const formats::TargetConfig& config() const { return files.config(); }
};

// What the target says about one sequence, every row; bf16 values are widened.
struct SequenceStates {
  std::vector<float> states;  // [T, (L+1)*E]: the taps, then the last layer's before the final norm
  std::vector<float> normed;  // [T, E]
  std::vector<float> logits;  // [T, V]
  bool operator==(const SequenceStates& other) const;  // bit by bit
};

// One forward call: the next `rows` tokens of each named sequence.
struct Piece {
  size_t sequence = 0;
  int64_t rows = 0;
};
using Call = std::vector<Piece>;

// Runs the calls in order; together they must cover every sequence exactly.
std::vector<SequenceStates> run_target(LoadedTarget& target, const std::vector<std::vector<int32_t>>& sequences,
                                       const std::vector<int>& taps, const std::vector<Call>& calls);
// The sequence in one call.
SequenceStates run_target(LoadedTarget& target, const std::vector<int32_t>& ids, const std::vector<int>& taps);

// The real model's file; FAILs the test when it is not there.
fs::path smollm2_path();

}  // namespace dspark::test
