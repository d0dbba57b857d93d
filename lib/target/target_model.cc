#include "target/target_model.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/finite.h"
#include "model/backends.h"

namespace dspark::target {

using namespace model;
using formats::TargetConfig;

TargetModel::TargetModel(Context& ctx, const TargetConfig& config, const TensorLoader& loader) : ctx_(ctx), config_(config) {
  const auto& c = config_;
  // transformers ignores a partial factor of these architectures, servers do not: there is no right answer to give.
  DS_REQUIRE(c.rope.type != "proportional" && c.rope.partial_rotary_factor == 1.0,
             "rotating a part of the head (rope type '{}', partial factor {}) is not supported in the native forward of {} targets; take the states from "
             "the server that will run the drafter",
             c.rope.type, c.rope.partial_rotary_factor, architecture_name(c.architecture));
  const int64_t e = c.hidden, q_cols = c.heads * c.head_dim, kv_cols = c.kv_heads * c.head_dim;
  auto allocate = [&](DType t, int64_t rows, int64_t cols) {
    owned_.push_back(ctx_.allocate(t, rows, cols));
    return owned_.back();
  };
  auto load = [&](const Tensor& dst, const std::string& name) {
    if (!loader) return;
    std::vector<float> v = loader(name);
    DS_REQUIRE(static_cast<int64_t>(v.size()) == dst.size(), "target tensor '{}': {} values, the config needs {}", name, v.size(), dst.size());
    ctx_.upload_now(dst, {v.data(), DType::f32, dst.rows, dst.cols, dst.cols});
  };
  auto vector = [&](const std::string& name, int64_t n) {
    const Tensor t = allocate(ctx_.acc_dtype(), 1, n);
    load(t, name);
    return t;
  };
  auto weight = [&](int64_t out, int64_t in) {
    Weight w;
    w.value = allocate(ctx_.act_dtype(), out, in);
    return w;
  };

  rope_ = make_rope_table(c.rope, c.head_dim, c.max_position);
  for (size_t i = 0; i < c.rope_divisors.size() && i < rope_.inv_freq.size(); ++i) rope_.inv_freq[i] /= c.rope_divisors[i];
  const auto n_freq = static_cast<int64_t>(rope_.inv_freq.size());
  inv_freq_ = allocate(ctx_.acc_dtype(), 1, n_freq);
  ctx_.upload_now(inv_freq_, {rope_.inv_freq.data(), DType::f64, 1, n_freq, n_freq});

  embed_ = allocate(ctx_.act_dtype(), c.vocab, e);
  load(embed_, "model.embed_tokens.weight");
  layers_.resize(static_cast<size_t>(c.layers));
  for (int64_t i = 0; i < c.layers; ++i) {
    Layer& l = layers_[static_cast<size_t>(i)];
    const std::string at = fmt::format("model.layers.{}.", i), self = at + "self_attn.";
    l.input_norm = vector(at + "input_layernorm.weight", e);
    l.post_norm = vector(at + "post_attention_layernorm.weight", e);
    if (c.qk_norm) {
      l.q_norm = vector(self + "q_norm.weight", c.head_dim);
      l.k_norm = vector(self + "k_norm.weight", c.head_dim);
    }
    l.q = weight(q_cols, e);
    load(l.q.value, self + "q_proj.weight");
    l.kv = weight(2 * kv_cols, e);
    load(l.kv.value.row_range(0, kv_cols), self + "k_proj.weight");
    load(l.kv.value.row_range(kv_cols, kv_cols), self + "v_proj.weight");
    l.o = weight(e, q_cols);
    load(l.o.value, self + "o_proj.weight");
    if (c.qkv_bias) {
      l.q_bias = vector(self + "q_proj.bias", q_cols);
      l.kv_bias = allocate(ctx_.acc_dtype(), 1, 2 * kv_cols);
      load(l.kv_bias.col_range(0, kv_cols), self + "k_proj.bias");
      load(l.kv_bias.col_range(kv_cols, kv_cols), self + "v_proj.bias");
    }
    if (c.o_bias) l.o_bias = vector(self + "o_proj.bias", e);
    l.gate_up = weight(2 * c.ffn, e);
    load(l.gate_up.value.row_range(0, c.ffn), at + "mlp.gate_proj.weight");
    load(l.gate_up.value.row_range(c.ffn, c.ffn), at + "mlp.up_proj.weight");
    l.down = weight(e, c.ffn);
    load(l.down.value, at + "mlp.down_proj.weight");
    if (c.mlp_bias) {
      l.gate_up_bias = allocate(ctx_.acc_dtype(), 1, 2 * c.ffn);
      load(l.gate_up_bias.col_range(0, c.ffn), at + "mlp.gate_proj.bias");
      load(l.gate_up_bias.col_range(c.ffn, c.ffn), at + "mlp.up_proj.bias");
      l.down_bias = vector(at + "mlp.down_proj.bias", e);
    }
    for (Weight* w : {&l.q, &l.kv, &l.o, &l.gate_up, &l.down}) refresh(ctx_, {w});
  }
  final_norm_ = vector("model.norm.weight", e);
  if (c.tied) {
    head_.value = embed_;
  } else {
    head_ = weight(c.vocab, e);
    load(head_.value, "lm_head.weight");
  }
  refresh(ctx_, {&head_});
}

TargetModel::~TargetModel() {
  for (const Tensor& t : owned_) ctx_.free(t);
}

KvCache TargetModel::make_cache(int64_t capacity) {
  KvCache cache;
  cache.capacity = capacity;
  const int64_t cols = config_.kv_heads * config_.head_dim;
  for (int64_t i = 0; i < config_.layers; ++i) {
    cache.k.push_back(ctx_.allocate(ctx_.act_dtype(), capacity, cols));
    cache.v.push_back(ctx_.allocate(ctx_.act_dtype(), capacity, cols));
  }
  return cache;
}

void TargetModel::free_cache(KvCache& cache) {
  for (auto* tensors : {&cache.k, &cache.v}) {
    for (const Tensor& t : *tensors) ctx_.free(t);
    tensors->clear();
  }
}

// delta = o(attention(rope(q), cache)): appends keys and values of h's rows to each segment's cache (length is moved by forward).
void TargetModel::attention(Arena& arena, size_t index, const Tensor& h, const Tensor& position, std::span<const Segment> segments,
                            const Tensor& delta) {
  const auto& c = config_;
  Layer& l = layers_[index];
  const int64_t n = h.rows, kv = c.kv_heads * c.head_dim;
  const Rope rope{inv_freq_, rope_.rot, rope_.scale};
  const Tensor q = arena.matrix(ctx_.act_dtype(), n, c.heads * c.head_dim), kv_raw = arena.matrix(ctx_.act_dtype(), n, 2 * kv);
  const Tensor out = arena.matrix(ctx_.act_dtype(), n, c.heads * c.head_dim);
  linear(ctx_, {q, h, &l.q});
  linear(ctx_, {kv_raw, h, &l.kv});
  if (l.q_bias) {
    add_bias(ctx_, {q, l.q_bias});
    add_bias(ctx_, {kv_raw, l.kv_bias});
  }
  const Tensor k = kv_raw.col_range(0, kv), v = kv_raw.col_range(kv, kv);
  qk_norm_rope(ctx_, {.y = q, .x = q, .weight = l.q_norm, .position = position, .rope = rope, .head_dim = c.head_dim, .eps = c.eps});
  qk_norm_rope(ctx_, {.y = k, .x = k, .weight = l.k_norm, .position = position, .rope = rope, .head_dim = c.head_dim, .eps = c.eps});
  int64_t row = 0;
  for (const Segment& s : segments) {
    KvCache& cache = *s.cache;
    copy(ctx_, {cache.k[index].row_range(cache.length, s.rows), k.row_range(row, s.rows)});
    copy(ctx_, {cache.v[index].row_range(cache.length, s.rows), v.row_range(row, s.rows)});
    cache_attention(ctx_, {out.row_range(row, s.rows), q.row_range(row, s.rows), cache.k[index], cache.v[index], cache.length,
                           c.windows[index], c.head_dim, 1.0 / std::sqrt(static_cast<double>(c.head_dim))});
    row += s.rows;
  }
  linear(ctx_, {delta, out, &l.o});
  if (l.o_bias) add_bias(ctx_, {delta, l.o_bias});
}

Tensor TargetModel::forward(Arena& arena, const Tensor& ids, std::span<const Segment> segments, std::span<const int> taps,
                            const Tensor& states) {
  const auto& c = config_;
  const int64_t n = ids.cols, e = c.hidden;
  std::vector<int32_t> positions;
  for (const Segment& s : segments) {
    DS_ASSERT(s.cache->length + s.rows <= s.cache->capacity, "{} + {} rows in a cache of {}", s.cache->length, s.rows, s.cache->capacity);
    DS_REQUIRE(c.rope.type != "dynamic" || s.cache->length + s.rows <= c.max_position,
               "a row of {} tokens is longer than the target's {} positions, behind which its dynamic rope is not supported; use a smaller --max-length",
               s.cache->length + s.rows, c.max_position);
    for (int64_t i = 0; i < s.rows; ++i) positions.push_back(static_cast<int32_t>(s.cache->length + i));
  }
  DS_ASSERT(static_cast<int64_t>(positions.size()) == n, "{} ids for {} rows of segments", n, positions.size());

  const Tensor normed = arena.matrix(ctx_.act_dtype(), n, e);
  const int64_t mark = arena.mark();
  const Tensor position = arena.vector(DType::i32, n);
  ctx_.upload_now(position, {positions.data(), DType::i32, 1, n, n});
  const Tensor x = arena.matrix(ctx_.acc_dtype(), n, e), delta = arena.matrix(ctx_.acc_dtype(), n, e);
  const Tensor h = arena.matrix(ctx_.act_dtype(), n, e);
  auto tap = [&](int64_t layers_done) {
    if (!states) return;
    for (size_t j = 0; j < taps.size(); ++j)
      if (taps[j] == layers_done) copy(ctx_, {states.col_range(static_cast<int64_t>(j) * e, e), x});
  };
  gather_rows(ctx_, {x, embed_, ids});
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& l = layers_[i];
    add_rmsnorm(ctx_, {.y = h, .x_out = i == 0 ? Tensor{} : x, .x = x, .delta = i == 0 ? Tensor{} : delta, .weight = l.input_norm,
                       .eps = c.eps});
    tap(static_cast<int64_t>(i));
    const int64_t layer_mark = arena.mark();
    attention(arena, i, h, position, segments, delta);
    add_rmsnorm(ctx_, {.y = h, .x_out = x, .x = x, .delta = delta, .weight = l.post_norm, .eps = c.eps});
    const Tensor gate_up = arena.matrix(ctx_.act_dtype(), n, 2 * c.ffn), s = arena.matrix(ctx_.act_dtype(), n, c.ffn);
    linear(ctx_, {gate_up, h, &l.gate_up});
    if (l.gate_up_bias) add_bias(ctx_, {gate_up, l.gate_up_bias});
    swiglu(ctx_, {s, gate_up});
    linear(ctx_, {delta, s, &l.down});
    if (l.down_bias) add_bias(ctx_, {delta, l.down_bias});
    arena.release(layer_mark);
  }
  add_rmsnorm(ctx_, {.y = normed, .x_out = x, .x = x, .delta = delta, .weight = final_norm_, .eps = c.eps});
  tap(c.layers);
  if (states) copy(ctx_, {states.col_range(static_cast<int64_t>(taps.size()) * e, e), x});
  for (const Segment& s : segments) s.cache->length += s.rows;
  arena.release(mark);
  return normed;
}

void TargetModel::logits(const Tensor& normed, const Tensor& out) { linear(ctx_, {out, normed, &head_}); }

int64_t TargetModel::arena_bytes(const TargetConfig& c, bool fp32, int64_t rows, int64_t logit_rows) {
  BackendOptions options;
  options.device = "plan";
  options.precision = fp32 ? Precision::fp32 : Precision::bf16;
  auto backend = make_plan_backend(options);
  Context& ctx = backend->context();
  TargetModel model(ctx, c, {});
  KvCache cache = model.make_cache(rows);
  Arena arena(ctx.device(), 0);
  const Segment segment{&cache, rows};
  const Tensor ids = arena.vector(DType::i32, rows);
  const Tensor normed = model.forward(arena, ids, {&segment, 1});
  if (logit_rows > 0) model.logits(normed.row_range(0, std::min(rows, logit_rows)), arena.matrix(ctx.acc_dtype(), std::min(rows, logit_rows), c.vocab));
  const int64_t peak = arena.peak_bytes();
  model.free_cache(cache);
  return peak;
}

void require_finite_logits(Context& ctx, const Tensor& logits, std::string_view what) {
  std::vector<float> host(static_cast<size_t>(logits.size()));
  ctx.download_now({host.data(), DType::f32, logits.rows, logits.cols, logits.cols}, logits);
  if (const auto bad = first_non_finite(host))
    fail("{} are not finite ({} for token id {}): the weights or the config are damaged, or too large for this precision", what, host[*bad], static_cast<int64_t>(*bad) % logits.cols);
}

}  // namespace dspark::target
