// Drafter folders on disk: config.json and model.safetensors, as speculators/vLLM and DeepSpec write them (DESIGN 7,
// CONTRACTS 1 and 2). Layer numbers and the draft vocabulary are converted here and nowhere else:
//   speculators  aux_hidden_state_layer_ids = n, d2t holds offsets (target id - draft id)
//   DeepSpec     target_layer_ids = n - 1, full vocabulary
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/files.h"
#include "core/json.h"
#include "formats/safetensors.h"
#include "model/drafter.h"

namespace dspark::model {

enum class DrafterFormat : uint8_t { speculators, deepspec };
const char* format_name(DrafterFormat f);

// A drafter folder, opened and checked: every tensor the config asks for is there with its shape, except those that may be
// shared with the target (embed_tokens; lm_head with the full vocabulary).
struct DrafterFiles {
  fs::path path;
  DrafterFormat format = DrafterFormat::speculators;
  DrafterConfig config;
  std::vector<int32_t> kept;     // target id of each draft id; empty: identity
  formats::SafetensorsSet tensors;
  std::vector<std::string> from_target;  // tensors to be taken from the target
};
DrafterFiles read_drafter(const fs::path& path);
// A tensor's values; throws when it is not there or a value is not finite.
std::vector<float> drafter_values(const DrafterFiles& files, const std::string& name);

// Names and shapes of all tensors a folder of this format must or may hold.
std::vector<formats::TensorSpec> expected_tensors(const DrafterConfig& config);

// A tensor's values as f32, by name: from a drafter on a device, from another folder, from the target.
using TensorValues = std::function<std::vector<float>(const std::string& name)>;

struct WriteOptions {
  DrafterFormat format = DrafterFormat::speculators;
  int64_t num_target_layers = 0;   // DeepSpec writes it; 0: unknown
  // Of embed_tokens and (full vocabulary) lm_head: what stays out because it is the target's. A drafter's own never does.
  std::vector<std::string> leave_out;
};
// Writes config.json and model.safetensors (bf16, round to nearest even), model first, config last, each atomically.
// Throws for what the format cannot express (a pruned vocabulary, a width of its own or the bonus layout in DeepSpec's).
void write_drafter(const fs::path& folder, const DrafterConfig& config, const std::vector<int32_t>& kept,
                   const TensorValues& values, const WriteOptions& options);

// config.json alone, read (and checked by itself) and as text.
DrafterConfig read_drafter_config(const fs::path& file, DrafterFormat* format);
std::string drafter_config_json(const DrafterConfig& config, const WriteOptions& options);

// Fills a drafter on a device from files; `target` serves embed_tokens.weight [V, D] and lm_head.weight [VD, D] when missing.
void load_drafter(Drafter& drafter, const DrafterFiles& files, const TensorValues& target);
// The other way: values of a drafter on a device (masters where there are any).
TensorValues device_values(Drafter& drafter);

}  // namespace dspark::model
