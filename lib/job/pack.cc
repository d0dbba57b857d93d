#include "job/pack.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "core/error.h"
#include "core/log.h"
#include "formats/hf_config.h"
#include "job/common.h"
#include "job/fit.h"
#include "job/store_tools.h"
#include "model/drafter_files.h"
#include "model/drafter_names.h"
#include "model/rope.h"
#include "target/target_files.h"
#include "train/init.h"

namespace dspark::job {

using namespace model;

namespace {

// How the drafter's heads were turned in training, by its config or by what the user knows.
void settle_rotary(DrafterConfig& c, const PackOptions& o) {
  using formats::Rotary;
  if (!o.rotary.empty()) {
    if (o.rotary != "served" && o.rotary != "reference") fail_usage("--rotary {}: served or reference", o.rotary);
    const Rotary said = o.rotary == "served" ? Rotary::served : Rotary::reference;
    DS_REQUIRE(c.rotary == Rotary::unknown || c.rotary == said, "--rotary {}: {} says that it was trained the other way", o.rotary, o.drafter.string());
    c.rotary = said;
    c.rope = trained_rope(c.rope, said);
  }
  const std::string doubt = rotary_doubt(c);
  DS_REQUIRE(doubt.empty(), "{}: {}; say how it was trained with --rotary reference (all of a head: the factor is dropped) or --rotary served", o.drafter.string(), doubt);
}

OrderedJson describe(const DrafterFiles& d) {
  const DrafterConfig& c = d.config;
  auto taps = OrderedJson::array();
  for (TapLayer t : c.taps) taps.push_back(t.n);
  auto tensors = OrderedJson::array();
  int64_t parameters = 0;
  for (const auto& name : d.tensors.names()) {
    const auto& t = d.tensors.get(name);
    parameters += t.count();
    tensors.push_back(OrderedJson{{"name", name}, {"dtype", dtype_name(t.dtype)}, {"shape", t.shape}});
  }
  return OrderedJson{{"format", format_name(d.format)}, {"algorithm", c.algorithm}, {"target", c.target_name}, {"hidden", c.hidden}, {"target_hidden", c.target_hidden}, {"layers", c.n_layers()},
                     {"heads", c.heads}, {"kv_heads", c.kv_heads}, {"head_dim", c.head_dim}, {"ffn", c.ffn}, {"vocabulary", c.vocab}, {"draft_vocabulary", c.draft_vocab},
                     {"taps_after_layers", taps}, {"block", c.block}, {"proposals", c.proposals()}, {"layout", layout_name(c.sample_from_anchor)}, {"markov", markov_name(c.markov)}, {"rank", c.rank},
                     {"confidence", c.confidence}, {"mask_token", c.mask_token}, {"window", c.window}, {"rope", c.rope.type}, {"rope_theta", c.rope.theta},
                     {"rope_parameters", formats::rope_to_hf(c.rope)}, {"max_position", c.max_position}, {"rotary", rotary_name(c.rotary)}, {"states_from", c.trained_on},
                     {"tokenizer_hash", c.tokenizer_hash}, {"from_target", d.from_target}, {"stored_values", parameters}, {"tensors", tensors}};
}

}  // namespace

void run_pack(const PackOptions& o) {
  DrafterFiles d = open_drafter(o.drafter);
  require_apart("--json", o.json, {o.drafter, o.target});
  JsonLines json(o.json);
  if (o.inspect) {
    if (const std::string doubt = rotary_doubt(d.config); !doubt.empty()) log_warn("{}: {}", o.drafter.string(), doubt);
    const OrderedJson j = describe(d);
    json.write(j);
    json.finish();
    if (o.json == "-") return;
    for (const auto& [key, value] : j.items())
      if (key != "tensors") fmt::print("{:<20} {}\n", key, value.is_string() ? printable(value.get<std::string>()) : value.dump());
    for (const auto& t : j["tensors"]) fmt::print("  {:<44} {:<5} {}\n", printable(t["name"].get<std::string>()), t["dtype"].get<std::string>(), t["shape"].dump());
    return;
  }
  if (o.to != "speculators" && o.to != "deepspec") fail_usage("--to {}: this version writes speculators and deepspec", o.to);
  if (o.out.empty()) fail_usage("pack needs --out PATH (or --inspect)");
  require_outside_stores(o.out);
  settle_rotary(d.config, o);
  DS_REQUIRE(!fs::exists(o.out / "config.json"), "{} holds a drafter already; choose another --out", o.out.string());
  WriteOptions w;
  w.format = o.to == "deepspec" ? DrafterFormat::deepspec : DrafterFormat::speculators;
  std::optional<target::TargetFiles> files;
  TensorValues from_target;
  if (!o.target.empty()) {
    files.emplace(o.target);
    require_fit(d, *files);
    from_target = train::target_values(*files, d.kept);
    w.num_target_layers = files->config().layers;
  }
  // speculators leaves the target's embeddings out; DeepSpec wants them in.
  if (!files) w.leave_out = d.from_target;
  DS_REQUIRE(w.format != DrafterFormat::deepspec || w.leave_out.empty(), "DeepSpec's format holds the target's embeddings, {} does not: add --target TARGET", o.drafter.string());
  write_drafter(o.out, d.config, d.kept, [&](const std::string& name) {
    return d.tensors.find(name) ? drafter_values(d, name) : from_target(name);
  }, w);
  read_drafter(o.out);  // what was written is a drafter
  log_info("{}: {} drafter of {} written", o.out.string(), o.to, o.drafter.string());
  json.write(OrderedJson{{"drafter", o.drafter.string()}, {"out", o.out.string()}, {"format", o.to}, {"bytes", fs::file_size(o.out / "model.safetensors")}, {"peak_rss_bytes", peak_rss_bytes()}});
  json.finish();
}

}  // namespace dspark::job
