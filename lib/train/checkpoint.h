// Checkpoints: everything a run needs to go on bit for bit, besides the target and the store.
//
//   OUT/checkpoints/step-00000120/   state.json                run position, configuration, metrics (written last)
//                                    masters.safetensors       fp32 masters of every trainable tensor
//                                    optimizer.safetensors     m.<name>, v.<name>
//
// Frozen tensors are left out. A folder is written under another name, synced, and renamed: one that has its final name is
// whole. The newest whole one is found by its number; older ones are removed only after a newer one is safe.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "core/files.h"
#include "core/json.h"
#include "train/optimizer.h"

namespace dspark::train {

// Writes OUT/checkpoints/step-N. `state` must hold "step"; `extra` may write more files into the (temporary) folder.
void save_checkpoint(const fs::path& out, int64_t step, model::Drafter& drafter, Optimizer& optimizer, const Json& state,
                     const std::function<void(const fs::path&)>& extra = {});
// Keeps the newest `keep`, removes the others and leftovers of interrupted writes.
void prune_checkpoints(const fs::path& out, int64_t keep);

struct FoundCheckpoint {
  fs::path folder;
  int64_t step = 0;
};
std::optional<FoundCheckpoint> newest_checkpoint(const fs::path& out);
Json read_checkpoint_state(const FoundCheckpoint& c);
// Loads masters (and the values that follow from them) and optimizer states. Throws when a tensor is missing or has another
// shape.
void load_checkpoint(const FoundCheckpoint& c, model::Drafter& drafter, Optimizer& optimizer);

}  // namespace dspark::train
