// The native target: a Llama-type decoder (Llama, Qwen2, Qwen3) on ops.h, with key/value caches and taps.
//
// One forward call runs rows of several sequences at once: each Segment is some next tokens of one sequence, its cache grows by
// them. Weights are bf16 (or fp32, as the device's act), the residual stream is acc. A row's bits do not depend on what else is
// in the call, so prefill, batched decoding, verification of a drafted block and single steps agree exactly.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "formats/hf_config.h"
#include "model/ops.h"
#include "model/rope.h"

namespace dspark::target {

// Keys and values of one sequence, every layer; rows [0, length) are filled. Truncating is setting `length`.
struct KvCache {
  std::vector<model::Tensor> k, v;  // a layer: [capacity, NKV*HD] act
  int64_t length = 0, capacity = 0;
};

struct Segment {
  KvCache* cache = nullptr;
  int64_t rows = 0;
};

// Values of a tensor by its Hugging Face name ("model.layers.3.self_attn.q_proj.weight"), row-major; empty: not in the file.
using TensorLoader = std::function<std::vector<float>(const std::string& name)>;

// Throws when logits cannot be sampled from, naming them as `what`: weights that are finite, but too large for what is computed with them.
void require_finite_logits(model::Context& ctx, const model::Tensor& logits, std::string_view what);

class TargetModel {
 public:
  // Loads every weight; without a loader (planning) nothing is written.
  TargetModel(model::Context& ctx, const formats::TargetConfig& config, const TensorLoader& loader);
  ~TargetModel();
  TargetModel(const TargetModel&) = delete;
  TargetModel& operator=(const TargetModel&) = delete;

  const formats::TargetConfig& config() const { return config_; }
  model::Context& context() { return ctx_; }
  KvCache make_cache(int64_t capacity);
  void free_cache(KvCache& cache);

  // ids i32 [1, n], n = sum of segment rows. Returns the last state after the final norm, [n, E] act (in the arena). With `states`
  // ([n, (L+1)*E] float), columns j*E.. get the residual stream after taps[j] layers, the last E the last layer's before the final
  // norm.
  model::Tensor forward(model::Arena& arena, const model::Tensor& ids, std::span<const Segment> segments,
                        std::span<const int> taps = {}, const model::Tensor& states = {});
  // logits acc [m, V] of normed rows [m, E] act.
  void logits(const model::Tensor& normed, const model::Tensor& out);

  const model::Tensor& embeddings() const { return embed_; }   // [V, E] act
  const model::Weight& head() const { return head_; }          // [V, E]
  const model::Tensor& final_norm() const { return final_norm_; }  // acc [1, E]

  // Arena bytes that forward and logits of `rows` rows (logits of `logit_rows`) with `taps` taps need.
  static int64_t arena_bytes(const formats::TargetConfig& config, bool fp32, int64_t rows, int64_t logit_rows);

 private:
  struct Layer {
    model::Weight q, kv, o, gate_up, down;
    model::Tensor input_norm, post_norm, q_norm, k_norm, q_bias, kv_bias, o_bias, gate_up_bias, down_bias;
  };
  void attention(model::Arena& arena, size_t index, const model::Tensor& h, const model::Tensor& position,
                 std::span<const Segment> segments, const model::Tensor& delta);

  model::Context& ctx_;
  formats::TargetConfig config_;
  std::vector<model::Tensor> owned_;
  std::vector<Layer> layers_;
  model::Tensor embed_, final_norm_, inv_freq_;
  model::Weight head_;
  model::RopeTable rope_;
};

}  // namespace dspark::target
