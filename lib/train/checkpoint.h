// Checkpoints: everything a run needs to go on bit for bit, besides the target and the store.
//
//   OUT/checkpoints/step-00000120/   state.json                run position, configuration, validation, every other file's size
//                                                              and CRC32C, and one of all this (written last)
//                                    masters.safetensors       fp32 masters of every trainable tensor
//                                    optimizer.safetensors     m.<name>, v.<name>
//
// A run on several ranks writes both once an owner, masters-00001-of-00004.safetensors and so on, into a folder that all of them see.
// Any number of ranks can go on from it: a tensor is found by its name.
//
// Frozen tensors are left out. A folder is written under another name, synced, and renamed; it loses its name before anything in
// it is removed. One whose files are not what its state says (cut, damaged, missing) is set aside as `damaged-N` and the one before
// it is taken. Older ones are removed only after a newer one is safe; the one with the best validation stays.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "core/files.h"
#include "core/json.h"
#include "train/optimizer.h"

namespace dspark::train {

// Writes OUT/checkpoints/step-N; all ranks together. `state` and `extra` are rank 0's. `state` must hold "step"; `extra` may write more files into the (temporary) folder.
void save_checkpoint(const fs::path& out, int64_t step, model::Drafter& drafter, Optimizer& optimizer, const Json& state,
                     const std::function<void(const fs::path&)>& extra = {});
// Keeps the newest `keep` and the best by `validation_tau` in their states, removes the others and leftovers of interrupted writes.
void prune_checkpoints(const fs::path& out, int64_t keep);

struct FoundCheckpoint {
  fs::path folder;
  int64_t step = 0;
};
// The newest that is whole to the last byte. Reads them; says what was wrong with those it passes over and sets them aside.
std::optional<FoundCheckpoint> newest_checkpoint(const fs::path& out);
// The one with the highest `validation_tau`, the earliest of equals; none if no validation was made.
struct BestCheckpoint {
  FoundCheckpoint checkpoint;
  double tau = 0;
};
std::optional<BestCheckpoint> best_checkpoint(const fs::path& out);
bool has_checkpoint(const fs::path& out);
// What rank 0 finds, for all ranks.
std::optional<FoundCheckpoint> newest_checkpoint(const fs::path& out, model::Collectives& ranks);
Json read_checkpoint_state(const FoundCheckpoint& c);
// Loads masters (and the values that follow from them) and optimizer states; all ranks together. Throws when a tensor is missing or
// has another shape.
void load_checkpoint(const FoundCheckpoint& c, model::Drafter& drafter, Optimizer& optimizer);

}  // namespace dspark::train
