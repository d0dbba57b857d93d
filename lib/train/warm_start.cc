// A drafter that starts as the target's last layers (DESIGN 14).
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/rng.h"
#include "model/rope.h"
#include "train/init.h"

namespace dspark::train {

using namespace model;

namespace {

void set_values(Drafter& drafter, const std::string& name, const std::vector<float>& v) {
  Parameter* p = drafter.find(name);
  DS_ASSERT(p != nullptr, "no parameter '{}'", name);
  drafter.set(*p, {v.data(), DType::f32, p->value.rows, p->value.cols, p->value.cols});
}

// The drafter norms q and k per head where the target does not. Weights that give them back their size on white input, a channel's
// root mean square over heads: without them every score is a cosine and attention starts nearly flat. w [heads*HD, E].
std::vector<float> norm_like(const std::vector<float>& w, const std::vector<float>& input_norm, int64_t heads, int64_t head_dim) {
  const auto e = static_cast<int64_t>(input_norm.size());
  std::vector<float> out;
  for (int64_t j = 0; j < head_dim; ++j) {
    double sum = 0;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < e; ++i) {
        const double x = static_cast<double>(w[static_cast<size_t>((h * head_dim + j) * e + i)]) * static_cast<double>(input_norm[static_cast<size_t>(i)]);
        sum += x * x;
      }
    out.push_back(static_cast<float>(std::sqrt(sum / static_cast<double>(heads))));
  }
  return out;
}

// markov_w1 as a random projection of the target's embeddings, so that what is learnt after one token holds for tokens like it:
// with little data most tokens are seen too rarely to learn a row of their own.
void project_embeddings(Drafter& drafter) {
  constexpr double kRms = 0.1;  // of a row of markov_w1
  Parameter& p = *drafter.find("markov_head.markov_w1.weight");
  Context& ctx = drafter.context();
  const int64_t e = drafter.embed.cols, rank = p.value.cols;
  const Tensor square = ctx.allocate(ctx.acc_dtype(), 1, 1), embed = ctx.allocate(ctx.acc_dtype(), drafter.embed.rows, e);
  copy(ctx, {embed, drafter.embed});
  sum_squares(ctx, {square, embed});
  double sum = 0;
  ctx.download_now({&sum, DType::f64, 1, 1, 1}, square);
  ctx.free(square);
  ctx.free(embed);
  if (sum == 0) return;
  const double deviation = kRms / (std::sqrt(sum / static_cast<double>(drafter.embed.rows * e)) * std::sqrt(static_cast<double>(e)));
  const Rng rng(0, RngStream::init, 0x4d61726b6f76);
  std::vector<float> v(static_cast<size_t>(rank * e));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(deviation * rng.normal(i));
  Weight projection;
  projection.value = ctx.allocate(ctx.act_dtype(), rank, e);
  ctx.upload_now(projection.value, {v.data(), DType::f32, rank, e, e});
  refresh(ctx, {&projection});
  const Tensor rows = ctx.allocate(ctx.acc_dtype(), p.value.rows, rank);
  linear(ctx, {rows, drafter.embed, &projection});
  copy(ctx, {p.value, rows});
  if (p.cast_on_update()) copy(ctx, {p.master, rows});
  ctx.free(rows);
  ctx.free(projection.value);
}

// Channel of the target's head that each channel of the drafter's takes, [HD]. The identity, unless the drafter rotates whole heads
// and the target their first part: pair i of the target turns at theta^(-2i/rot), pair j of the drafter at theta^(-2j/HD), so i
// goes to j = i HD/rot. Channels the target does not rotate fill the other places in order.
std::vector<int64_t> head_order(const DrafterConfig& c, const formats::TargetConfig& t) {
  std::vector<int64_t> order(static_cast<size_t>(c.head_dim), -1);
  const int64_t rot = make_rope_table(t.rope, t.head_dim, t.max_position).rot, hd = c.head_dim;
  if (rot == make_rope_table(c.rope, hd, c.max_position).rot) {
    for (int64_t i = 0; i < hd; ++i) order[static_cast<size_t>(i)] = i;
    return order;
  }
  for (int64_t i = 0; i < rot / 2; ++i) {
    const int64_t j = i * hd / rot;
    order[static_cast<size_t>(j)] = i;
    order[static_cast<size_t>(j + hd / 2)] = i + rot / 2;
  }
  int64_t next = rot;
  for (int64_t& from : order)
    if (from < 0) from = next++;
  return order;
}

// Rows of every head of w [heads*HD, cols] in that order.
std::vector<float> ordered(const std::vector<float>& w, const std::vector<int64_t>& order, int64_t heads) {
  const auto hd = static_cast<int64_t>(order.size()), cols = static_cast<int64_t>(w.size()) / (heads * hd);
  std::vector<float> out;
  out.reserve(w.size());
  for (int64_t h = 0; h < heads; ++h)
    for (const int64_t from : order) {
      const auto row = w.begin() + (h * hd + from) * cols;
      out.insert(out.end(), row, row + cols);
    }
  return out;
}

}  // namespace

void warm_start(Drafter& drafter, const target::TargetFiles& files) {
  const DrafterConfig& c = drafter.config();
  const auto& t = files.config();
  DS_REQUIRE(!c.own_embeddings(), "a warm start needs the target's width {}, the drafter has {}; use --warm-start none", t.hidden, c.hidden);
  DS_REQUIRE(c.n_layers() <= t.layers, "a warm start of {} layers needs a target of at least as many, it has {}; use --warm-start none", c.n_layers(), t.layers);
  const std::vector<int64_t> order = head_order(c, t);
  std::vector<float> context_norm(static_cast<size_t>(c.hidden), 0.0f);
  for (int64_t i = 0; i < c.n_layers(); ++i) {
    const std::string from = fmt::format("model.layers.{}.", t.layers - c.n_layers() + i), to = fmt::format("layers.{}.", i);
    for (const char* name : {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
                             "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"})
      set_values(drafter, to + name, files.tensor(from + name));
    const auto norm = files.tensor(from + "input_layernorm.weight");
    for (const char* side : {"q", "k"}) {
      const int64_t heads = side[0] == 'q' ? t.heads : t.kv_heads;
      const std::string matrix = fmt::format("self_attn.{}_proj.weight", side), head_norm = fmt::format("self_attn.{}_norm.weight", side);
      const auto w = files.tensor(from + matrix);
      set_values(drafter, to + matrix, ordered(w, order, heads));
      set_values(drafter, to + head_norm, ordered(t.qk_norm ? files.tensor(from + head_norm) : norm_like(w, norm, heads, t.head_dim), order, 1));
    }
    for (size_t j = 0; j < norm.size(); ++j) context_norm[j] += norm[j] / static_cast<float>(c.n_layers());
  }
  // The context goes into k and v without the layers' own input norms: their mean stands in for them.
  set_values(drafter, "hidden_norm.weight", context_norm);
  set_values(drafter, "norm.weight", files.tensor("model.norm.weight"));
  const int64_t width = c.n_taps() * c.target_hidden;
  std::vector<float> fc(static_cast<size_t>(c.hidden * width), 0.0f);
  for (int64_t i = 0; i < c.hidden; ++i) fc[static_cast<size_t>(i * width + (c.n_taps() - 1) * c.target_hidden + i)] = 1.0f;
  set_values(drafter, "fc.weight", fc);
  if (c.rank > 0) project_embeddings(drafter);
  if (c.rank > 0) set_values(drafter, "markov_head.markov_w2.weight", std::vector<float>(static_cast<size_t>(c.draft_vocab * c.rank), 0.0f));
  drafter.refresh();
}

}  // namespace dspark::train
