#include "tiny_target.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "core/rng.h"
#include "formats/byte_level.h"
#include "formats/gguf.h"

using namespace dspark;
using formats::GgmlType;

void write_tiny_target(const fs::path& path, const TinyTarget& t) {
  formats::GgufWriter w(path);
  const std::string& a = t.architecture;
  w.set_string("general.architecture", a);
  w.set_u32(a + ".embedding_length", static_cast<uint32_t>(t.hidden));
  w.set_u32(a + ".block_count", static_cast<uint32_t>(t.layers));
  w.set_u32(a + ".attention.head_count", static_cast<uint32_t>(t.heads));
  w.set_u32(a + ".attention.head_count_kv", static_cast<uint32_t>(t.kv_heads));
  w.set_u32(a + ".feed_forward_length", static_cast<uint32_t>(t.ffn));
  w.set_u32(a + ".context_length", 4096);
  w.set_f32(a + ".attention.layer_norm_rms_epsilon", static_cast<float>(t.eps));
  if (t.rotated > 0) w.set_u32(a + ".rope.dimension_count", static_cast<uint32_t>(t.rotated));
  if (t.rope_theta > 0) w.set_f32(a + ".rope.freq_base", static_cast<float>(t.rope_theta));
  for (const auto& [key, value] : t.reals) w.set_f32(a + "." + key, static_cast<float>(value));

  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  auto token = [&](const std::string& text, int32_t type) {
    tokens.push_back(text), types.push_back(type);
    return static_cast<uint32_t>(tokens.size() - 1);
  };
  for (int b = 0; b < 256; ++b) token(formats::spelling_of_bytes(std::string(1, static_cast<char>(b))), 1);
  const uint32_t bos = token("<|im_start|>", 3), eos = token("<|im_end|>", 3);
  const uint32_t mask = token("<|mask|>", 3);
  for (int64_t i = 0; i < t.extra_tokens; ++i) token(fmt::format("<|extra {}|>", i), 5);
  w.set_string("tokenizer.ggml.model", "gpt2");
  w.set_string("tokenizer.ggml.pre", "smollm");
  w.set_strings("tokenizer.ggml.tokens", tokens);
  w.set_strings("tokenizer.ggml.merges", {});
  w.set_i32s("tokenizer.ggml.token_type", types);
  w.set_u32("tokenizer.ggml.bos_token_id", bos);
  w.set_u32("tokenizer.ggml.eos_token_id", eos);
  w.set_u32("tokenizer.ggml.mask_token_id", mask);
  w.set_string("tokenizer.chat_template", t.chat_template);

  const int64_t head_dim = t.hidden / t.heads, kv = t.kv_heads * head_dim, vocab = static_cast<int64_t>(tokens.size());
  std::vector<std::pair<std::string, std::vector<int64_t>>> tensors = {{"token_embd.weight", {vocab, t.hidden}}, {"output_norm.weight", {t.hidden}}};
  for (int64_t i = 0; i < t.layers; ++i) {
    const std::string at = fmt::format("blk.{}.", i);
    tensors.push_back({at + "attn_norm.weight", {t.hidden}});
    tensors.push_back({at + "attn_q.weight", {t.hidden, t.hidden}});
    tensors.push_back({at + "attn_k.weight", {kv, t.hidden}});
    tensors.push_back({at + "attn_v.weight", {kv, t.hidden}});
    tensors.push_back({at + "attn_output.weight", {t.hidden, t.hidden}});
    tensors.push_back({at + "ffn_norm.weight", {t.hidden}});
    tensors.push_back({at + "ffn_gate.weight", {t.ffn, t.hidden}});
    tensors.push_back({at + "ffn_up.weight", {t.ffn, t.hidden}});
    tensors.push_back({at + "ffn_down.weight", {t.hidden, t.ffn}});
  }
  for (const auto& [name, shape] : tensors) w.add_tensor(name, GgmlType::F32, shape);
  w.begin();
  for (size_t n = 0; n < tensors.size(); ++n) {
    const auto& [name, shape] = tensors[n];
    const Rng rng(t.seed, RngStream::test, n);
    const bool norm = shape.size() == 1;
    std::vector<float> v(static_cast<size_t>(shape[0] * (norm ? 1 : shape[1])));
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(norm ? 1 + 0.1 * rng.normal(i) : 0.1 * rng.normal(i));
    if (name == t.spoilt) v[v.size() / 2] = static_cast<float>(t.spoiling);
    w.write(name, std::as_bytes(std::span(v)));
  }
  w.finish();
}

std::string tiny_rows(int n, int words, uint64_t seed) {
  const char* vocabulary[] = {"water", "stone", "light", "runs", "over", "the", "old", "bridge", "and", "then", "falls", "slowly"};
  const Rng rng(seed, RngStream::test, 7);
  uint64_t next = 0;
  std::string out;
  for (int i = 0; i < n; ++i) {
    std::string answer;
    for (int k = 0; k < words; ++k) answer += (k ? " " : "") + std::string(vocabulary[rng.below(next++, 12)]);
    const OrderedJson question{{"role", "user"}, {"content", fmt::format("Say line {}.", i)}}, reply{{"role", "assistant"}, {"content", answer}};
    out += OrderedJson{{"messages", OrderedJson::array({question, reply})}}.dump() + "\n";
  }
  return out;
}
