#include "model/drafter.h"

#include <algorithm>

namespace dspark::model {

Drafter::Drafter(Context& ctx, const DrafterConfig& config, const DrafterOptions& options)
    : ctx_(ctx), config_(config), options_(options), rope_(make_rope_table(config.rope, config.head_dim, config.max_position)) {
  validate(config_);
  const auto& c = config_;
  const int64_t d = c.hidden, q = c.q_cols(), kv = c.kv_cols();
  const bool train = options_.trainable;

  const auto n_freq = static_cast<int64_t>(rope_.inv_freq.size());
  inv_freq_ = allocate(ctx_.acc_dtype(), 1, n_freq);
  ctx_.upload_now(inv_freq_, {rope_.inv_freq.data(), DType::f64, 1, n_freq, n_freq});

  const bool own = train && options_.train_embeddings;

  // A matrix of its own: value, and master and gradient when it is trained.
  auto matrix = [&](const std::string& name, Tensor value, Tensor* grad) {
    Tensor g;
    if (train) *grad = g = allocate(ctx_.acc_dtype(), value.rows, value.cols);
    add_parameter(name, value, train ? make_master(name, value) : Tensor{}, g, false);
  };
  // Row ranges of one fused matrix under their own names.
  auto fused = [&](const Weight& w, Tensor* grad, const std::vector<std::pair<std::string, int64_t>>& names) {
    if (train) *grad = allocate(ctx_.acc_dtype(), w.out(), w.in());
    int64_t row = 0;
    for (const auto& [name, rows] : names) {
      const Tensor value = w.value.row_range(row, rows);
      add_parameter(name, value, train ? make_master(name, value) : Tensor{}, train ? grad->row_range(row, rows) : Tensor{}, false);
      row += rows;
    }
  };

  bucket_ = buckets() - 1;
  embed = allocate(ctx_.act_dtype(), c.vocab, d);
  if (own) matrix("embed_tokens.weight", embed, &d_embed);
  else add_parameter("embed_tokens.weight", embed, {}, {}, false);
  fc_ = make_weight(d, c.n_taps() * c.target_hidden);
  matrix("fc.weight", fc_.value, &d_fc_);
  hidden_norm_ = add_vector("hidden_norm.weight", d, true, &d_hidden_norm_);
  layers_.resize(c.layers.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    DrafterLayer& l = layers_[i];
    const std::string at = fmt::format("layers.{}.", i);
    l.type = c.layers[i];
    bucket_ = layer_bucket(i);
    l.input_norm = add_vector(at + "input_layernorm.weight", d, true, &l.d_input_norm);
    l.q = make_weight(q, d);
    matrix(at + "self_attn.q_proj.weight", l.q.value, &l.d_q);
    l.kv = make_weight(2 * kv, d);
    fused(l.kv, &l.d_kv, {{at + "self_attn.k_proj.weight", kv}, {at + "self_attn.v_proj.weight", kv}});
    l.o = make_weight(d, q);
    matrix(at + "self_attn.o_proj.weight", l.o.value, &l.d_o);
    if (c.attention_bias) {
      l.q_bias = add_vector(at + "self_attn.q_proj.bias", q, true, &l.d_q_bias);
      l.kv_bias = allocate(ctx_.acc_dtype(), 1, 2 * kv);
      if (train) l.d_kv_bias = allocate(ctx_.acc_dtype(), 1, 2 * kv);
      for (int64_t part : {0, 1}) {
        const Tensor value = l.kv_bias.col_range(part * kv, kv);
        add_parameter(at + (part == 0 ? "self_attn.k_proj.bias" : "self_attn.v_proj.bias"), value, train ? value : Tensor{},
                      train ? l.d_kv_bias.col_range(part * kv, kv) : Tensor{}, true);
      }
      l.o_bias = add_vector(at + "self_attn.o_proj.bias", d, true, &l.d_o_bias);
    }
    l.q_norm = add_vector(at + "self_attn.q_norm.weight", c.head_dim, true, &l.d_q_norm);
    l.k_norm = add_vector(at + "self_attn.k_norm.weight", c.head_dim, true, &l.d_k_norm);
    l.post_norm = add_vector(at + "post_attention_layernorm.weight", d, true, &l.d_post_norm);
    l.gate_up = make_weight(2 * c.ffn, d);
    fused(l.gate_up, &l.d_gate_up, {{at + "mlp.gate_proj.weight", c.ffn}, {at + "mlp.up_proj.weight", c.ffn}});
    l.down = make_weight(d, c.ffn);
    matrix(at + "mlp.down_proj.weight", l.down.value, &l.d_down);
  }
  norm_ = add_vector("norm.weight", d, true, &d_norm_);

  bucket_ = kHeadsBucket;
  head = make_weight(c.draft_vocab, c.joint_cols());
  // What is trained of [lm_head | markov_w2]: its last columns, one block of gradients.
  const int64_t head_cols = own ? c.joint_cols() : train ? c.rank : 0;
  const Tensor lm_head = head.value.col_range(0, d);
  if (head_cols > 0) d_head = allocate(ctx_.acc_dtype(), c.draft_vocab, head_cols);
  if (own) add_parameter("lm_head.weight", lm_head, make_master("lm_head.weight", lm_head), d_head.col_range(0, d), false);
  else add_parameter("lm_head.weight", lm_head, {}, {}, false);
  if (c.rank > 0) {
    markov_w1 = allocate(ctx_.act_dtype(), c.vocab, c.rank);
    matrix("markov_head.markov_w1.weight", markov_w1, &d_markov_w1);
    const Tensor w2 = head.value.col_range(d, c.rank);
    add_parameter("markov_head.markov_w2.weight", w2, train ? make_master("markov_head.markov_w2.weight", w2) : Tensor{},
                  train ? d_head.col_range(head_cols - c.rank, c.rank) : Tensor{}, false);
    if (c.markov != Markov::vanilla) {
      const bool rnn = c.markov == Markov::rnn;
      const std::string name = rnn ? "markov_head.joint_proj." : "markov_head.gate_proj.";
      markov_mix = rnn ? make_weight(3 * c.rank, 2 * c.rank + d) : make_weight(c.rank, d + c.rank);
      matrix(name + "weight", markov_mix.value, &d_markov_mix);
      markov_bias = add_vector(name + "bias", markov_mix.out(), true, &d_markov_bias);
    }
  }
  if (c.confidence) {
    confidence_w = add_vector("confidence_head.proj.weight", c.confidence_cols(), true, &d_confidence_w, 1);
    confidence_b = add_vector("confidence_head.proj.bias", 1, true, &d_confidence_b);
  }
}

Drafter::~Drafter() {
  for (const Tensor& t : owned_) ctx_.free(t);
}

Tensor Drafter::allocate(DType dtype, int64_t rows, int64_t cols) {
  owned_.push_back(ctx_.allocate(dtype, rows, cols));
  return owned_.back();
}

Weight Drafter::make_weight(int64_t out, int64_t in) {
  Weight w;
  w.value = allocate(ctx_.act_dtype(), out, in);
  w.needs_input_gradient = options_.trainable;
  return w;
}

void Drafter::add_parameter(std::string name, Tensor value, Tensor master, Tensor grad, bool is_vector) {
  const bool trainable = static_cast<bool>(grad), owned = trainable && owns(name);
  parameters_.push_back({std::move(name), value, master, grad, trainable, is_vector, owned, bucket_});
}

// Where products read acc there is one copy, and every rank has it.
Tensor Drafter::make_master(const std::string& name, const Tensor& value) {
  if (value.dtype == ctx_.acc_dtype()) return value;
  return owns(name) ? allocate(ctx_.acc_dtype(), value.rows, value.cols) : Tensor{};
}

// rows 1: a [1, n] matrix in files (the confidence head), 0: a vector.
Tensor Drafter::add_vector(const std::string& name, int64_t n, bool trainable, Tensor* grad, int64_t rows) {
  const Tensor value = allocate(ctx_.acc_dtype(), 1, n);
  const bool train = trainable && options_.trainable;
  if (train) *grad = allocate(ctx_.acc_dtype(), 1, n);
  add_parameter(name, value, train ? value : Tensor{}, train ? *grad : Tensor{}, rows == 0);
  return value;
}

Parameter* Drafter::find(const std::string& name) {
  auto it = std::find_if(parameters_.begin(), parameters_.end(), [&](const Parameter& p) { return p.name == name; });
  return it == parameters_.end() ? nullptr : &*it;
}

void Drafter::set(Parameter& p, const ConstHostMatrix& host) {
  DS_REQUIRE(host.rows == p.value.rows && host.cols == p.value.cols, "tensor '{}' is [{}, {}], this drafter needs [{}, {}]",
             p.name, host.rows, host.cols, p.value.rows, p.value.cols);
  ctx_.upload_now(p.value, host);
  if (p.cast_on_update()) ctx_.upload_now(p.master, host);
}

void Drafter::refresh() {
  model::refresh(ctx_, {&head});
  refresh_backbone();
}

void Drafter::refresh_trainable() {
  if (d_head) refresh();
  else refresh_backbone();  // the head is frozen: its packings stay
}

void Drafter::refresh_backbone() {
  model::refresh(ctx_, {&fc_});
  if (markov_mix.value) model::refresh(ctx_, {&markov_mix});
  for (auto& l : layers_)
    for (Weight* w : {&l.q, &l.kv, &l.o, &l.gate_up, &l.down}) model::refresh(ctx_, {w});
}

}  // namespace dspark::model
