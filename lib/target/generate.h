// Batched generation with the native target: many sequences decode together, each with its own cache; a finished one makes room
// for the next (continuous batching). What a sequence says depends on its prompt, its seed and the sampling parameters only,
// never on what else is in the batch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "target/target_model.h"

namespace dspark::target {

struct GenerateOptions {
  model::SamplingParams sampling;
  int64_t max_new_tokens = 256;
  int64_t max_length = 2048;     // prompt and answer together
  int64_t batch = 32;            // sequences at once
  uint64_t seed = 0;
  std::vector<int32_t> end_tokens;
  std::string target = "the target";  // its name in messages
};

struct Prompt {
  uint64_t id = 0;               // its random numbers' substream
  std::vector<int32_t> ids;      // at least one
};

struct Generated {
  uint64_t id = 0;
  std::vector<int32_t> prompt, ids;  // ids: with the end token, if one came
  bool ended = false;                // by an end token; else by a limit
};

class Generator {
 public:
  Generator(TargetModel& target, const GenerateOptions& options);
  ~Generator();
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  // `next` fills the prompt and returns true, or false when there are no more; `done` gets every finished sequence (false from
  // it stops after the current step).
  void run(const std::function<bool(Prompt&)>& next, const std::function<bool(Generated&&)>& done);

 private:
  struct Slot;
  void admit(Slot& slot, Prompt&& prompt);
  std::vector<Slot*> step(std::vector<int32_t>& sampled);
  bool accept(Slot& slot, int32_t token);

  TargetModel& target_;
  model::Context& ctx_;
  GenerateOptions options_;
  model::Arena arena_;
  std::vector<Slot> slots_;
};

}  // namespace dspark::target
