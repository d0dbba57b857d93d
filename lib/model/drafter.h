// The drafter's weights and its graph, forward and backward, written once on ops.h.
//
// A Drafter owns its weights on one device. Each named tensor of DESIGN 7 is a `Parameter`: `value` is what products read (act;
// norms, biases and the confidence head are read in acc, so there `value` is the master), `master` (acc) is what the optimizer
// moves and `grad` (acc) what the backward writes; both are empty for frozen tensors. Fused matrices (k|v, gate|up,
// lm_head|markov_w2) are one allocation of values and one of gradients with named views. Of several ranks only a tensor's owner
// has its master.
//
//   Drafter d(ctx, config, {.trainable = true});
//   for (auto& p : d.parameters()) d.set(p, host_matrix);   d.refresh();
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/batch_plan.h"
#include "model/drafter_config.h"
#include "model/ops.h"
#include "model/rope.h"

namespace dspark::model {

struct Parameter {
  std::string name;
  Tensor value;   // [rows, cols]; a vector is [1, n]
  Tensor master;  // acc; equal to value when there is no other copy; empty when frozen, or another rank's
  Tensor grad;    // acc; empty when frozen
  bool trainable = false;
  bool is_vector = false;  // a 1-D tensor in files
  bool owned = false;      // trainable, and updated on this rank
  int64_t bucket = 0;      // whose gradients the backward finishes together
  bool cast_on_update() const { return master && !(master.data == value.data); }
};

struct DrafterLayer {
  Weight q, kv, o, gate_up, down;
  Tensor input_norm, post_norm, q_norm, k_norm;      // acc
  Tensor d_q, d_kv, d_o, d_gate_up, d_down;          // grads, acc
  Tensor d_input_norm, d_post_norm, d_q_norm, d_k_norm;
  Tensor q_bias, kv_bias, o_bias, d_q_bias, d_kv_bias, d_o_bias;  // empty without attention_bias
  LayerType type = LayerType::full;
};

// Gradients become final in buckets, one after the other from 0: the heads', then a layer's each from the last one down (the final norm
// with the last), then what the context and the embeddings go through. Called right after a bucket's last write was enqueued.
using GradientsReady = std::function<void(int64_t bucket)>;
inline constexpr int64_t kHeadsBucket = 0;

struct DrafterOptions {
  bool trainable = true;         // masters and gradients exist
  bool train_embeddings = false; // of embed_tokens and lm_head too
  std::function<bool(const std::string& name)> owns;  // of the trainable ones; empty: all
};

// Activations the backward needs; filled by forward, all in the arena.
struct LayerSaved {
  Tensor x_in, inv_in, h, q_raw, kv_raw, kv_ctx_raw, q, k, k_ctx, inv_q, inv_k, inv_k_ctx, att, lse;
  Tensor x_mid, inv_mid, u, gate_up, swiglu;
};
// What the Markov head's backward needs. Gated: rows are supervised slots; rnn: all block rows.
struct MarkovSaved {
  Tensor x;      // act: gated [S, D+R] = [hidden | e]; rnn [A*B, 2R+D] = [state | e | hidden]
  Tensor pre;    // acc: gated [S, R]; rnn [A*B, 3R]
  Tensor state;  // acc, rnn [A*B, R]: after each slot
  Tensor out;    // act, rnn [A*B, R]: what W2 takes
  Tensor e;      // act [S, R]: W1[previous token], for the confidence head
};
struct ForwardState {
  Tensor fc_out, inv_context, context;  // [T, D]
  std::vector<LayerSaved> layers;
  Tensor x_last, inv_last, hidden;      // [A*B, D]
};

class Drafter {
 public:
  Drafter(Context& ctx, const DrafterConfig& config, const DrafterOptions& options);
  ~Drafter();
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;

  const DrafterConfig& config() const { return config_; }
  Context& context() { return ctx_; }
  std::vector<Parameter>& parameters() { return parameters_; }
  int64_t buckets() const { return config_.n_layers() + 2; }
  Parameter* find(const std::string& name);
  // Copies host values into value (and master); call refresh() after the last one.
  void set(Parameter& p, const ConstHostMatrix& host);
  void refresh();             // every packing, after set() of any
  void refresh_trainable();   // after an optimizer step

  // ---- graph ----
  // c = rmsnorm(fc(taps); hidden_norm): taps [T, L*E] act -> out [T, D] act. fc_out acc and inv are kept when given.
  void context_rows(Arena& arena, const Tensor& taps, Tensor context, Tensor fc_out, Tensor inv);
  // Layer i's keys and values of context rows, before norm and rope; then the keys with both, at `position` (i32 [1, n]). All act.
  // `inv_freq`: DeviceBatch's.
  void context_kv(int64_t layer, const Tensor& context, const Tensor& kv_raw);
  void context_keys(int64_t layer, const Tensor& kv_raw, const Tensor& position, const Tensor& k, const Tensor& inv, const Tensor& inv_freq);
  // Forward of one batch: taps [T, L*E] act. Fills `state`; state.hidden [A*B, D] act.
  void forward(Arena& arena, const Tensor& taps, const DeviceBatch& batch, ForwardState& state);
  // Gradients of everything trainable below `hidden`; d_hidden [A*B, D] acc. `write` as in ops.h. `ready`, if any, hears of all
  // buckets but the heads'.
  void backward(Arena& arena, const Tensor& taps, const DeviceBatch& batch, const ForwardState& state, const Tensor& d_hidden,
                Write write, const GradientsReady& ready = {});
  // The Markov head (DESIGN 3) on supervised slots: what W2 multiplies, into `features` act [S, R] (columns of the joint matrix).
  // vanilla: features are e = W1[previous token] themselves.
  void markov_forward(Arena& arena, const Tensor& hidden, const DeviceBatch& batch, Tensor features, MarkovSaved& saved);
  // From d_joint acc [S, D+R] = [d_hidden | d_features] and d_e acc [S, R] (the confidence head's, or empty; vanilla: in d_joint)
  // to every gradient of the head and to d_hidden acc [A*B, D], which is overwritten.
  void markov_backward(Arena& arena, const DeviceBatch& batch, const MarkovSaved& saved, const Tensor& d_joint, const Tensor& d_e,
                       const Tensor& d_hidden, Write write);
  // One slot while decoding: features act [1, R] from hidden act [1, D] and the previous token; `state` acc [1, R] is the rnn
  // head's, `first` says that it is zero.
  void markov_step(Arena& arena, const Tensor& hidden, const Tensor& previous, Tensor state, bool first, Tensor features);
  bool markov_has_state() const { return config_.rank > 0 && config_.markov == Markov::rnn; }

  // The block rows only, over cached context keys and values: k_ctx[i], v_ctx[i] [T, NKV*HD] a layer. For decoding.
  Tensor block_forward(Arena& arena, const std::vector<Tensor>& k_ctx, const std::vector<Tensor>& v_ctx, const DeviceBatch& batch);

  Weight head;              // [VD, D+R]: lm_head | markov_w2
  Tensor d_head;            // acc [VD, R or D+R], empty when there is nothing to train
  Tensor embed;             // act [V, D]
  Tensor d_embed;           // acc, empty when frozen
  Tensor markov_w1, d_markov_w1;        // act [V, R], acc
  Weight markov_mix;                    // gated: gate_proj [R, D+R]; rnn: joint_proj [3R, 2R+D]
  Tensor markov_bias, d_markov_mix, d_markov_bias;  // acc [1, R or 3R]; gradients
  Tensor confidence_w, confidence_b, d_confidence_w, d_confidence_b;  // acc

 private:
  struct Block;
  void refresh_backbone();
  void rnn_forward(Arena& arena, const Tensor& hidden, const DeviceBatch& batch, Tensor features, MarkovSaved& saved);
  void rnn_backward(Arena& arena, const DeviceBatch& batch, const MarkovSaved& saved, const Tensor& d_features, const Tensor& d_x,
                    const Tensor& d_pre);
  void attention_rows(Arena& arena, DrafterLayer& layer, LayerSaved& s, const DeviceBatch& batch);
  AnchorRule rule(const DrafterLayer& layer) const;
  // `row`: a row's own frequencies (dynamic rope), or empty.
  Rope rope(const Tensor& row) const { return {row ? row : inv_freq_, rope_.rot, rope_.scale}; }
  Tensor allocate(DType dtype, int64_t rows, int64_t cols);
  Weight make_weight(int64_t out, int64_t in);
  int64_t layer_bucket(size_t layer) const { return static_cast<int64_t>(layers_.size() - layer); }
  bool owns(const std::string& name) const { return !options_.owns || options_.owns(name); }
  Tensor make_master(const std::string& name, const Tensor& value);
  void add_parameter(std::string name, Tensor value, Tensor master, Tensor grad, bool is_vector);
  Tensor add_vector(const std::string& name, int64_t n, bool trainable, Tensor* grad, int64_t rows = 0);

  Context& ctx_;
  DrafterConfig config_;
  DrafterOptions options_;
  std::vector<Tensor> owned_;
  std::vector<Parameter> parameters_;
  int64_t bucket_ = 0;  // of the parameters that are being added
  Weight fc_;
  Tensor d_fc_, hidden_norm_, d_hidden_norm_, norm_, d_norm_;
  std::vector<DrafterLayer> layers_;
  RopeTable rope_;
  Tensor inv_freq_;
};

}  // namespace dspark::model
