#include "golden_train.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "formats/hf_config.h"
#include "model/rope.h"
#include "train/init.h"

namespace dspark::golden {

using namespace model;

DrafterConfig drafter_config(const Json& d) {
  const Json& c = d.at("config");
  DrafterConfig out;
  out.hidden = c.at("D"), out.target_hidden = c.at("E"), out.ffn = c.at("F");
  out.heads = c.at("NH"), out.kv_heads = c.at("NKV"), out.head_dim = c.at("HD");
  out.vocab = c.at("V"), out.draft_vocab = c.at("VD");
  out.layers.assign(c.at("K").get<size_t>(), LayerType::full);
  for (size_t i = 0; c.contains("layer_types") && i < out.layers.size(); ++i)
    if (c["layer_types"][i] == "sliding_attention") out.layers[i] = LayerType::sliding;
  out.window = c.contains("window") && !c["window"].is_null() ? c["window"].get<int64_t>() : 0;
  out.sliding_causal = !c.value("non_causal", false);
  out.attention_bias = c.value("attention_bias", false);
  for (int i = 0; i < c.at("L").get<int>(); ++i) out.taps.push_back({i + 1});
  out.block = c.at("B"), out.rank = c.at("R");
  const std::string markov = c.at("markov").is_string() ? c.at("markov").get<std::string>() : "none";
  out.markov = markov == "none" ? Markov::none : markov == "gated" ? Markov::gated : markov == "rnn" ? Markov::rnn : Markov::vanilla;
  out.confidence = c.at("confidence");
  out.confidence_with_markov = c.at("confidence_with_markov");
  out.sample_from_anchor = c.value("sample_from_anchor", true);
  out.eps = c.at("eps");
  out.mask_token = c.at("mask_token_id");
  out.max_position = c.value("max_position_embeddings", 4096);
  const Json& rules = d.at("rules");
  out.window_by_anchor = rules.at("window") == "anchor";
  out.rotary = rules.value("rotary", "reference") == "reference" ? formats::Rotary::reference : formats::Rotary::served;
  if (c.contains("rope_parameters")) out.rope = trained_rope(formats::rope_from_hf(c, d.at("case").get<std::string>()), out.rotary);
  return out;
}

train::Objective objective(const Json& d) {
  const Json& c = d.at("config");
  train::Objective o;
  for (const auto& [name, value] : c.at("loss").items()) {
    if (name == "ce") o.coef[kCe] = value;
    else if (name == "l1") o.coef[kTv] = 2 * value.get<double>();
    else if (name == "tv") o.coef[kTv] = value;
    else if (name == "kl_div") o.coef[kKl] = value;
    else if (name == "rkl") o.coef[kRkl] = value;
    else if (name == "jsd") o.coef[kJsd] = value;
    else if (name == "nla") o.coef[kNla] = value;
    else if (name == "lk_hybrid") o.coef[kLk] = value;
    else fail("golden: loss term '{}' is not handled here", name);
  }
  o.coef[kConf] = c.at("confidence").get<bool>() ? c.at("confidence_alpha").get<double>() : 0.0;
  o.gamma = c.at("gamma").is_null() ? 0 : c.at("gamma").get<double>();
  const Json& rules = d.at("rules");
  o.denominator = rules.at("denominator") == "count" ? train::Denominator::count : train::Denominator::micro;
  o.slots = rules.at("slots") == "row_mask" ? SlotRule::row_mask : SlotRule::label_prefix;
  o.label_from_target = rules.at("label") == "target_argmax";
  if (c.value("position_weight", "") == "dpace") o.dpace_alpha = c.at("dpace_alpha");
  o.dpace_confidence = o.dpace_alpha > 0 && d.at("case").get<std::string>().find("c05b95b3") != std::string::npos;
  return o;
}

std::unique_ptr<PackedCase> pack_case(const formats::SafetensorsFile& file, const std::string& prefix, const DrafterConfig& config,
                                      const train::Objective& o, int64_t row_index, int64_t anchor_row,
                                      std::span<const int32_t> draft_id) {
  auto p = std::make_unique<PackedCase>();
  const auto& ids_view = file.get(prefix + "input_ids");
  const auto ids = formats::read_i64(ids_view), mask = formats::read_i64(file.get(prefix + "loss_mask"));
  const auto anchors = formats::read_i64(file.get(prefix + "anchors")), valid = formats::read_i64(file.get(prefix + "anchor_valid"));
  const auto taps = values(file, prefix + "hidden_states"), last = values(file, prefix + "last_hidden_states");
  const int64_t tap_cols = config.n_taps() * config.target_hidden, e = config.target_hidden;
  const auto take_row = [&](int64_t row) {
    p->tokens.push_back(static_cast<int32_t>(ids[row]));
    p->mask.push_back(static_cast<uint8_t>(mask[row]));
    p->taps.insert(p->taps.end(), taps.begin() + row * tap_cols, taps.begin() + (row + 1) * tap_cols);
    p->last.insert(p->last.end(), last.begin() + row * e, last.begin() + (row + 1) * e);
    p->context_rows.push_back(row);
  };
  const bool packed = file.find(prefix + "lengths") == nullptr;  // spk: one packed row as it is, padding at its end
  if (packed) {
    const auto document = formats::read_i64(file.get(prefix + "document_ids"));
    const int64_t length = ids_view.shape.back(), n_anchors = file.get(prefix + "anchors").shape.back();
    for (int64_t t = 0; t < length; ++t) {
      const int64_t row = row_index * length + t;
      take_row(row);
      if (document[row] < 0) continue;
      if (t == 0 || document[row] != document[row - 1]) p->documents.push_back({t, t});
      p->documents.back().end = t + 1;
    }
    for (int64_t a = 0; a < n_anchors; ++a) {
      if (valid[anchor_row * n_anchors + a] == 0) continue;
      p->anchors.push_back(static_cast<int32_t>(anchors[anchor_row * n_anchors + a]));
      p->anchor_slots.push_back(a);
    }
  }
  const std::vector<int64_t> lengths = packed ? std::vector<int64_t>{} : formats::read_i64(file.get(prefix + "lengths"));
  const auto n = static_cast<int64_t>(lengths.size());
  const int64_t t_max = n > 0 ? static_cast<int64_t>(ids.size()) / n : 0, a_max = n > 0 ? static_cast<int64_t>(anchors.size()) / n : 0;
  for (int64_t doc = 0; doc < n; ++doc) {
    const auto begin = static_cast<int64_t>(p->tokens.size());
    for (int64_t t = 0; t < lengths[doc]; ++t) {
      take_row(doc * t_max + t);
    }
    p->documents.push_back({begin, static_cast<int64_t>(p->tokens.size())});
    for (int64_t a = 0; a < a_max; ++a) {
      if (valid[doc * a_max + a] == 0) continue;
      p->anchors.push_back(static_cast<int32_t>(begin + anchors[doc * a_max + a]));
      p->anchor_slots.push_back(doc * a_max + a);
    }
  }
  PlanInput in = plan_input(config);
  in.tokens = p->tokens, in.mask = p->mask, in.documents = p->documents, in.anchors = p->anchors;
  in.draft_id = draft_id;
  in.gamma = o.gamma, in.slots = o.slots;
  in.chunk_slots = 16;  // several chunks, so that their seams are tested too
  p->batch.plan = make_batch_plan(in);
  const auto rows = static_cast<int64_t>(p->tokens.size());
  p->batch.taps = {p->taps.data(), DType::f64, rows, tap_cols, tap_cols};
  p->batch.last = {p->last.data(), DType::f64, rows, e, e};
  return p;
}

Harness::Harness(const BackendOptions& options, const Json& d, const formats::SafetensorsFile& file)
    : backend(make_backend(options)), config(drafter_config(d)), objective(golden::objective(d)) {
  Context& ctx = backend->context();
  drafter = std::make_unique<Drafter>(ctx, config, DrafterOptions{});
  for (Parameter& p : drafter->parameters()) {
    const auto v = values(file, p.name);
    drafter->set(p, {v.data(), DType::f64, p.value.rows, p.value.cols, p.value.cols});
  }
  drafter->refresh();
  // Trajectories carry no head of the target's own: there it is the drafter's.
  const auto head = values(file, file.find("target.lm_head.weight") ? "target.lm_head.weight" : "lm_head.weight");
  target.head.value = ctx.allocate(ctx.act_dtype(), config.draft_vocab, config.target_hidden);
  ctx.upload_now(target.head.value, {head.data(), DType::f64, config.draft_vocab, config.target_hidden, config.target_hidden});
  refresh(ctx, {&target.head});
  target.apply_norm = d.at("config").at("last_state") == "pre_norm";
  target.eps = config.eps;
  if (target.apply_norm) {
    const auto norm = values(file, "target.norm.weight");
    target.norm = ctx.allocate(ctx.acc_dtype(), 1, config.target_hidden);
    ctx.upload_now(target.norm, {norm.data(), DType::f64, 1, config.target_hidden, config.target_hidden});
  }
  step = std::make_unique<train::TrainStep>(ctx, *drafter, target, objective, train::StepMemory{int64_t{64} << 20, int64_t{64} << 20, 1 << 20});
}

Harness::Harness(const BackendOptions& options, const DrafterFiles& files, const target::TargetFiles& target_files,
                 const train::Objective& o)
    : backend(make_backend(options)), config(files.config), objective(o) {
  Context& ctx = backend->context();
  const TensorValues from_target = train::target_values(target_files, files.kept);
  drafter = std::make_unique<Drafter>(ctx, config, DrafterOptions{.trainable = false});
  load_drafter(*drafter, files, from_target);
  const auto head = from_target("lm_head.weight"), norm = target_files.tensor("model.norm.weight");
  target.head.value = ctx.allocate(ctx.act_dtype(), config.draft_vocab, config.target_hidden);
  ctx.upload_now(target.head.value, {head.data(), DType::f32, config.draft_vocab, config.target_hidden, config.target_hidden});
  refresh(ctx, {&target.head});
  target.norm = ctx.allocate(ctx.acc_dtype(), 1, config.target_hidden);
  ctx.upload_now(target.norm, {norm.data(), DType::f32, 1, config.target_hidden, config.target_hidden});
  target.eps = target_files.config().eps;
  step = std::make_unique<train::TrainStep>(ctx, *drafter, target, objective, train::StepMemory{int64_t{512} << 20, int64_t{64} << 20, 1 << 20});
}

Harness::~Harness() {
  step.reset();
  backend->context().free(target.head.value);
  if (target.norm) backend->context().free(target.norm);
  drafter.reset();
}

std::vector<double> Harness::download(const Tensor& t) {
  std::vector<double> v(static_cast<size_t>(t.size()));
  backend->context().download_now({v.data(), DType::f64, t.rows, t.cols, t.cols}, t);
  return v;
}

}  // namespace dspark::golden
