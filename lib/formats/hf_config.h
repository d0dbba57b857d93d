// What a target model is, in numbers: read from a Hugging Face config.json (transformers 4 and 5 spellings) or from the
// metadata of a GGUF file. Nothing of a file is guessed silently: an architecture, activation, rope variant or weight
// quantisation that the native forward does not compute is an Error that names it. (A rope that turns a part of the head is read,
// since drafters are trained for it, and refused by the native forward.)
//
// Supported: Llama (`llama`), Qwen2 (`qwen2`), Qwen3 (`qwen3`), dense.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/files.h"
#include "core/json.h"
#include "formats/gguf.h"
#include "formats/rope_config.h"

namespace dspark::formats {

enum class Architecture : uint8_t { llama, qwen2, qwen3 };
std::string_view architecture_name(Architecture a);  // "llama": model_type of HF and general.architecture of GGUF alike
std::string_view hf_class_name(Architecture a);      // "LlamaForCausalLM"

struct TargetConfig {
  Architecture architecture = Architecture::llama;
  int64_t hidden = 0;  // E
  int64_t layers = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;         // V: rows of the embedding matrix
  int64_t max_position = 0;  // max_position_embeddings
  double eps = 1e-6;         // of every RMS norm
  RopeConfig rope;           // halves rotate as in HF; see `interleaved_qk`
  // GGUF's rope_freqs.weight: divisors of the frequencies [HD/2] (how Llama 3's scaling is stored there); else empty.
  std::vector<double> rope_divisors;
  bool tied = false;  // the output matrix is the embedding matrix
  bool qkv_bias = false, o_bias = false, mlp_bias = false;
  bool qk_norm = false;  // RMS norm per head on q and k before rope
  // Rows of q and k are stored permuted so that rotary pairs are neighbours (GGUF `llama`): row 2i + j of a head in the
  // file is row i + j * HD/2 as HF has it. A property of the file, not of the model: not part of the hash.
  bool interleaved_qk = false;
  std::vector<int64_t> windows;  // [layers] positions a query sees, itself included; 0: all
  // Not part of the hash either.
  int64_t bos_token = -1;           // -1: the file does not say
  std::vector<int64_t> eos_tokens;  // ascending; HF: config.json and generation_config.json together
};

// `target`: a Hugging Face folder (or its config.json), or a GGUF file.
TargetConfig read_target_config(const fs::path& target);
TargetConfig target_config_from_hf(const fs::path& config_json);
TargetConfig target_config_from_gguf(const Gguf& gguf);

// The config as one line of JSON with sorted keys, reals rounded to fp32 (GGUF has no more), and its SHA-256: equal for
// two files of one model, different when anything that changes its states does.
std::string canonical_text(const TargetConfig& config);
std::string config_hash(const TargetConfig& config);

// Rope settings of any HF config: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (4). Where
// both spellings are there they must agree. `where` names the file in messages. Types are those of RopeConfig.
RopeConfig rope_from_hf(const Json& config, std::string_view where);
// The value of `rope_parameters` for it.
OrderedJson rope_to_hf(const RopeConfig& rope);

}  // namespace dspark::formats
