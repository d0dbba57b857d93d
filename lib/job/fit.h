// Whether a drafter and a target belong together, and whether this machine can hold one that is trained.
#pragma once

#include "model/backends.h"
#include "model/drafter_files.h"
#include "target/target_files.h"
#include "train/optimizer.h"

namespace dspark::job {

// Reads a drafter's folder. Of a run that has not finished, which is none yet, the error says where its checkpoints are.
model::DrafterFiles open_drafter(const fs::path& path);

// Throws, with what the drafter says and what the target has, where it would decode wrongly instead of failing: widths, vocabulary,
// tapped layers, tokenizer.
void require_fit(const model::DrafterFiles& drafter, const target::TargetFiles& target);

// Throws when the backend's attention cannot do heads this wide.
void require_heads(const model::Backend& backend, int64_t head_dim, const std::string& whose);

// Throws when weights, gradients and optimizer states alone exceed the memory there is: allocated one by one they would end in the
// system killing the process, without a word.
void require_memory(const model::DrafterConfig& config, model::Precision precision, const train::OptimizerOptions& optimizer);

}  // namespace dspark::job
