#include "model/drafter_files.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/finite.h"

namespace dspark::model {

using formats::SafetensorsSet;
using formats::TensorSpec;

const char* format_name(DrafterFormat f) { return f == DrafterFormat::speculators ? "speculators" : "deepspec"; }

std::vector<TensorSpec> expected_tensors(const DrafterConfig& c) {
  std::vector<TensorSpec> out;
  auto add = [&](std::string name, std::vector<int64_t> shape) { out.push_back({std::move(name), DType::bf16, std::move(shape)}); };
  const int64_t d = c.hidden;
  add("embed_tokens.weight", {c.vocab, d});
  add("fc.weight", {d, c.n_taps() * c.target_hidden});
  add("hidden_norm.weight", {d});
  for (int64_t i = 0; i < c.n_layers(); ++i) {
    const std::string at = fmt::format("layers.{}.", i);
    add(at + "input_layernorm.weight", {d});
    add(at + "self_attn.q_proj.weight", {c.q_cols(), d});
    add(at + "self_attn.k_proj.weight", {c.kv_cols(), d});
    add(at + "self_attn.v_proj.weight", {c.kv_cols(), d});
    add(at + "self_attn.o_proj.weight", {d, c.q_cols()});
    if (c.attention_bias) {
      add(at + "self_attn.q_proj.bias", {c.q_cols()});
      add(at + "self_attn.k_proj.bias", {c.kv_cols()});
      add(at + "self_attn.v_proj.bias", {c.kv_cols()});
      add(at + "self_attn.o_proj.bias", {d});
    }
    add(at + "self_attn.q_norm.weight", {c.head_dim});
    add(at + "self_attn.k_norm.weight", {c.head_dim});
    add(at + "post_attention_layernorm.weight", {d});
    add(at + "mlp.gate_proj.weight", {c.ffn, d});
    add(at + "mlp.up_proj.weight", {c.ffn, d});
    add(at + "mlp.down_proj.weight", {d, c.ffn});
  }
  add("norm.weight", {d});
  add("lm_head.weight", {c.draft_vocab, d});
  if (c.rank > 0) {
    add("markov_head.markov_w1.weight", {c.vocab, c.rank});
    add("markov_head.markov_w2.weight", {c.draft_vocab, c.rank});
    if (c.markov == Markov::gated) {
      add("markov_head.gate_proj.weight", {c.rank, d + c.rank});
      add("markov_head.gate_proj.bias", {c.rank});
    }
    if (c.markov == Markov::rnn) {
      add("markov_head.joint_proj.weight", {3 * c.rank, 2 * c.rank + d});
      add("markov_head.joint_proj.bias", {3 * c.rank});
    }
  }
  if (c.confidence) {
    add("confidence_head.proj.weight", {1, c.confidence_cols()});
    add("confidence_head.proj.bias", {1});
  }
  return out;
}

namespace {

// Offsets to target ids; checked to ascend, to stay inside the vocabulary, and to agree with t2d where that is given.
std::vector<int32_t> read_kept(const SafetensorsSet& tensors, const DrafterConfig& c) {
  const auto* d2t = tensors.find("d2t");
  if (!d2t) {
    DS_REQUIRE(c.draft_vocab == c.vocab, "{}: the draft vocabulary is {} of {} tokens but tensor 'd2t'{} missing: which token a draft id means is lost",
               tensors.path().string(), c.draft_vocab, c.vocab, tensors.find("t2d") ? " is" : " and 't2d' are");
    return {};
  }
  const auto offsets = formats::read_i64(tensors.get("d2t", {c.draft_vocab}));
  std::vector<int32_t> kept;
  for (int64_t i = 0; i < c.draft_vocab; ++i) {
    const int64_t id = i + offsets[static_cast<size_t>(i)];
    DS_REQUIRE(id >= 0 && id < c.vocab && (i == 0 || id > kept.back()),
               "{}: d2t[{}] gives target id {}, which is outside the vocabulary of {} or does not ascend", tensors.path().string(), i, id, c.vocab);
    kept.push_back(static_cast<int32_t>(id));
  }
  if (tensors.find("t2d")) {
    const auto t2d = formats::read_i64(tensors.get("t2d", {c.vocab}));
    DS_REQUIRE(std::accumulate(t2d.begin(), t2d.end(), int64_t{0}) == c.draft_vocab &&
                   std::all_of(kept.begin(), kept.end(), [&](int32_t id) { return t2d[static_cast<size_t>(id)] == 1; }),
               "{}: t2d and d2t name different tokens", tensors.path().string());
  }
  if (c.draft_vocab == c.vocab) return {};
  return kept;
}

}  // namespace

DrafterFiles read_drafter(const fs::path& path) {
  DS_REQUIRE(fs::exists(path), "no such drafter: {}", path.string());
  DS_REQUIRE(fs::is_directory(path), "{} is not a drafter folder (config.json and model.safetensors)", path.string());
  DS_REQUIRE(fs::exists(path / "config.json"), "{} holds no config.json: it is not a drafter folder", path.string());
  DrafterFormat format{};
  DrafterConfig config = read_drafter_config(path / "config.json", &format);
  DrafterFiles files{path, format, std::move(config), {}, SafetensorsSet::open(path), {}};
  const DrafterConfig& c = files.config;
  files.kept = read_kept(files.tensors, c);
  for (const TensorSpec& spec : expected_tensors(c)) {
    const auto* view = files.tensors.find(spec.name);
    if (!view) {
      const bool shared = spec.name == "embed_tokens.weight" || (spec.name == "lm_head.weight" && c.draft_vocab == c.vocab);
      DS_REQUIRE(shared, "{}: tensor '{}' {} is missing", path.string(), spec.name, formats::shape_text(spec.shape));
      DS_REQUIRE(!c.own_embeddings(), "{}: tensor '{}' {} is missing; it cannot be the target's, whose width is {}", path.string(), spec.name,
                 formats::shape_text(spec.shape), c.target_hidden);
      files.from_target.push_back(spec.name);
      continue;
    }
    DS_REQUIRE(view->shape == spec.shape, "{}: tensor '{}' is {}, the config needs {}", path.string(), spec.name,
               formats::shape_text(view->shape), formats::shape_text(spec.shape));
  }
  return files;
}

namespace {
// A drafter that is not finite proposes nothing, whoever made it: it is neither written nor loaded.
void require_finite(const std::vector<float>& v, const std::string& name, const std::string& what) {
  if (const auto bad = first_non_finite(v)) fail("{}: tensor '{}' holds {} at element {}", what, name, v[*bad], *bad);
}
}  // namespace

std::vector<float> drafter_values(const DrafterFiles& files, const std::string& name) {
  std::vector<float> v = formats::read_f32(files.tensors.get(name));
  require_finite(v, name, files.path.string());
  return v;
}

namespace {
// A folder that was made for a drafter that could not be written goes again.
struct NoEmptyFolder {
  fs::path folder;
  ~NoEmptyFolder() {
    if (!folder.empty()) ::rmdir(folder.c_str());  // with something in it, it stays
  }
};
}  // namespace

void write_drafter(const fs::path& folder, const DrafterConfig& c, const std::vector<int32_t>& kept, const TensorValues& values,
                   const WriteOptions& options) {
  const std::string config = drafter_config_json(c, options);  // throws for what the format cannot say
  std::error_code ec;
  const NoEmptyFolder guard{fs::exists(folder, ec) ? fs::path() : folder};
  make_folder(folder);
  std::vector<TensorSpec> specs;
  for (auto& spec : expected_tensors(c)) {
    const bool shared = spec.name == "embed_tokens.weight" || (spec.name == "lm_head.weight" && kept.empty());
    const bool left_out = std::find(options.leave_out.begin(), options.leave_out.end(), spec.name) != options.leave_out.end();
    if (!shared || !left_out || c.own_embeddings() || options.format == DrafterFormat::deepspec) specs.push_back(spec);
  }
  if (!kept.empty()) {
    specs.push_back({"d2t", DType::i64, {c.draft_vocab}});
    specs.push_back({"t2d", DType::boolean, {c.vocab}});
  }
  formats::SafetensorsWriter writer(folder / "model.safetensors", specs, {{"format", "pt"}});
  for (const TensorSpec& spec : writer.specs()) {
    if (spec.name == "d2t") {
      std::vector<int64_t> offsets;
      for (size_t i = 0; i < kept.size(); ++i) offsets.push_back(kept[i] - static_cast<int64_t>(i));
      writer.write(spec.name, offsets);
    } else if (spec.name == "t2d") {
      std::vector<uint8_t> mask(static_cast<size_t>(c.vocab), 0);
      for (int32_t id : kept) mask[static_cast<size_t>(id)] = 1;
      writer.write(spec.name, mask);
    } else {
      const std::vector<float> v = values(spec.name);
      DS_ASSERT(static_cast<int64_t>(v.size()) == formats::shape_count(spec.shape, spec.name), "{}: {} values for {}", spec.name, v.size(),
                formats::shape_text(spec.shape));
      require_finite(v, spec.name, fmt::format("the drafter for {} is not written", folder.string()));
      std::vector<bf16> rounded(v.size());
      std::transform(v.begin(), v.end(), rounded.begin(), to_bf16);
      writer.write(spec.name, rounded);
    }
  }
  writer.finish();
  write_text_atomic(folder / "config.json", config);
}

void load_drafter(Drafter& drafter, const DrafterFiles& files, const TensorValues& target) {
  for (Parameter& p : drafter.parameters()) {
    const std::vector<float> v = files.tensors.find(p.name) ? drafter_values(files, p.name) : target(p.name);
    DS_REQUIRE(static_cast<int64_t>(v.size()) == p.value.size(), "{}: tensor '{}' has {} values, expected {}", files.path.string(), p.name,
               v.size(), p.value.size());
    drafter.set(p, {v.data(), DType::f32, p.value.rows, p.value.cols, p.value.cols});
  }
  drafter.refresh();
}

TensorValues device_values(Drafter& drafter) {
  return [&drafter](const std::string& name) {
    const Parameter* p = drafter.find(name);
    DS_ASSERT(p != nullptr, "no tensor '{}'", name);
    const Tensor& t = p->master ? p->master : p->value;
    std::vector<float> v(static_cast<size_t>(t.size()));
    drafter.context().download_now({v.data(), DType::f32, t.rows, t.cols, t.cols}, t);
    return v;
  };
}

}  // namespace dspark::model
