#include "target/target_files.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <span>

#include "core/error.h"
#include "core/finite.h"
#include "core/hash.h"

namespace dspark::target {

using namespace formats;

namespace {

// "model.layers.3.self_attn.q_proj.weight" -> "blk.3.attn_q.weight".
std::string gguf_name(const std::string& name) {
  static const std::map<std::string, std::string> kWhole = {{"model.embed_tokens.weight", "token_embd.weight"},
                                                            {"model.norm.weight", "output_norm.weight"},
                                                            {"lm_head.weight", "output.weight"}};
  static const std::map<std::string, std::string> kLayer = {
      {"input_layernorm", "attn_norm"},   {"post_attention_layernorm", "ffn_norm"}, {"self_attn.q_proj", "attn_q"},
      {"self_attn.k_proj", "attn_k"},     {"self_attn.v_proj", "attn_v"},           {"self_attn.o_proj", "attn_output"},
      {"self_attn.q_norm", "attn_q_norm"}, {"self_attn.k_norm", "attn_k_norm"},     {"mlp.gate_proj", "ffn_gate"},
      {"mlp.up_proj", "ffn_up"},          {"mlp.down_proj", "ffn_down"}};
  if (auto it = kWhole.find(name); it != kWhole.end()) return it->second;
  constexpr std::string_view prefix = "model.layers.";
  DS_ASSERT(name.starts_with(prefix), "tensor name {}", name);
  const size_t dot = name.find('.', prefix.size()), suffix = name.rfind('.');
  const auto it = kLayer.find(name.substr(dot + 1, suffix - dot - 1));
  DS_ASSERT(it != kLayer.end(), "tensor name {}", name);
  return fmt::format("blk.{}.{}{}", name.substr(prefix.size(), dot - prefix.size()), it->second, name.substr(suffix));
}

// Rows of q and k as GGUF `llama` files order them (rotated pairs are neighbours) back to halves.
void undo_interleave(std::vector<float>& w, int64_t head_dim, int64_t heads, const std::string& name) {
  const int64_t rows = heads * head_dim, half = head_dim / 2;
  const auto cols = static_cast<int64_t>(w.size()) / rows;
  DS_REQUIRE(cols * rows == static_cast<int64_t>(w.size()), "target tensor '{}': {} values are not {} rows", name, w.size(), rows);
  std::vector<float> out(w.size());
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row / head_dim, r = row % head_dim;
    std::copy_n(w.begin() + (head * head_dim + (r % half) * 2 + r / half) * cols, cols, out.begin() + row * cols);
  }
  w = std::move(out);
}

}  // namespace

struct TargetFiles::Source {
  std::optional<Gguf> gguf;
  std::optional<SafetensorsSet> tensors;
  // Not std::call_once: an exception must not pass through glibc's pthread_once, whose unwinder is not ours (the binary has
  // libgcc in it), and what could not be read fails again the next time.
  std::mutex mutex;
  std::unique_ptr<Tokenizer> tokenizer;
  std::string template_text;
  std::unique_ptr<ChatTemplate> chat;
};

TargetFiles::TargetFiles(const fs::path& path) : path_(path), source_(std::make_unique<Source>()) {
  DS_REQUIRE(fs::exists(path), "no such target: {}", path.string());
  if (fs::is_directory(path)) {
    DS_REQUIRE(fs::exists(path / "config.json"), "{} holds no config.json: a target is a Hugging Face folder or a .gguf file", path.string());
    config_ = target_config_from_hf(path / "config.json");
    source_->tensors.emplace(SafetensorsSet::open(path));
  } else {
    source_->gguf.emplace(path);
    config_ = target_config_from_gguf(*source_->gguf);
  }
  config_hash_ = formats::config_hash(config_);
}

TargetFiles::~TargetFiles() = default;

std::string TargetFiles::name() const {
  const fs::path p = path_.has_filename() ? path_ : path_.parent_path();
  return p.filename().string();
}

std::string TargetFiles::quantisation() const {
  std::map<std::string, int64_t> elements;  // by type; matrices only, vectors are kept in full everywhere
  if (source_->gguf) {
    for (const auto& t : source_->gguf->tensors())
      if (t.shape.size() > 1) elements[ggml_type_info(t.type).name] += t.count();
  } else {
    for (const auto& file : source_->tensors->files())
      for (const auto& t : file.tensors())
        if (t.shape.size() > 1) elements[std::string(dtype_name(t.dtype))] += t.count();
  }
  std::vector<std::pair<int64_t, std::string>> order;
  for (const auto& [name, n] : elements) order.emplace_back(n, name);
  std::sort(order.rbegin(), order.rend());
  std::string text;
  for (const auto& [n, name] : order) text += (text.empty() ? "" : text.find(' ') == std::string::npos ? " with " : ", ") + name;
  return text;
}

std::string TargetFiles::id() const { return sha256_hex(config_hash() + weights_hash()); }

std::string TargetFiles::weights_hash() const {
  std::map<std::string, std::span<const std::byte>> tensors;
  if (source_->gguf) {
    for (const auto& t : source_->gguf->tensors()) tensors.emplace(t.name, t.data);
  } else {
    for (const auto& file : source_->tensors->files())
      for (const auto& t : file.tensors()) tensors.emplace(t.name, t.data);
  }
  constexpr size_t kMost = 1024, kPiece = 4096;
  const size_t step = (tensors.size() + kMost - 1) / kMost;
  std::string sample;
  size_t index = 0;
  for (const auto& [name, data] : tensors) {
    if (index++ % step != 0) continue;
    sample += fmt::format("{} {}\n", name, data.size());
    const size_t piece = std::min(kPiece, data.size());
    for (const size_t at : {size_t{0}, (data.size() - piece) / 2, data.size() - piece}) sample.append(reinterpret_cast<const char*>(data.data()) + at, piece);
  }
  return sha256_hex(sample);
}

const Tokenizer& TargetFiles::tokenizer() const {
  const std::lock_guard lock(source_->mutex);
  if (source_->tokenizer) return *source_->tokenizer;
  TokenizerData data;
  if (source_->gguf) {
    data = read_tokenizer_gguf(*source_->gguf);
  } else {
    DS_REQUIRE(fs::exists(path_ / "tokenizer.json"), "{} holds no tokenizer.json", path_.string());
    data = read_tokenizer_json(path_ / "tokenizer.json");
  }
  source_->template_text = data.chat_template;
  try {
    source_->tokenizer = std::make_unique<Tokenizer>(std::move(data));
  } catch (const Error& e) {
    throw Error(fmt::format("{}: {}", path_.string(), e.what()), e.code());
  }
  return *source_->tokenizer;
}

bool TargetFiles::has_chat_template() const {
  tokenizer();
  return !source_->template_text.empty();
}

const ChatTemplate& TargetFiles::chat_template() const {
  DS_REQUIRE(has_chat_template(), "{} carries no chat template: give rows with input_ids and loss_mask", path_.string());
  const std::lock_guard lock(source_->mutex);
  if (!source_->chat) source_->chat = std::make_unique<ChatTemplate>(source_->template_text, name());
  return *source_->chat;
}

ChatOptions TargetFiles::chat_options() const {
  const Tokenizer& t = tokenizer();
  ChatOptions options;
  if (t.bos() >= 0) options.bos_token = t.text(t.bos());
  if (t.eos() >= 0) options.eos_token = t.text(t.eos());
  return options;
}

Render TargetFiles::render() const {
  const ChatTemplate& chat = chat_template();
  const ChatOptions base = chat_options();
  return [&chat, base](const OrderedJson& messages, const OrderedJson* tools, bool add_generation_prompt) {
    ChatOptions options = base;
    options.tools = tools;
    options.add_generation_prompt = add_generation_prompt;
    return chat.render(messages, options);
  };
}

std::vector<float> TargetFiles::tensor(const std::string& name) const {
  const std::string there = source_->gguf ? gguf_name(name) : name;
  std::vector<float> v = source_->gguf ? read_f32(source_->gguf->get(there)) : read_f32(source_->tensors->get(there));
  if (const auto bad = first_non_finite(v))
    fail("{}: tensor '{}' holds {} at element {}: the file is damaged, or was converted badly; get it again", path_.string(), there, v[*bad], *bad);
  if (source_->gguf && config_.interleaved_qk && (name.find(".q_proj.") != std::string::npos || name.find(".k_proj.") != std::string::npos))
    undo_interleave(v, config_.head_dim, name.find(".q_proj.") != std::string::npos ? config_.heads : config_.kv_heads, name);
  return v;
}

TensorLoader TargetFiles::loader() const {
  return [this](const std::string& name) { return tensor(name); };
}

}  // namespace dspark::target
