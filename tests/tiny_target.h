// A target small enough to extract from and train on in milliseconds: a random Llama with a byte tokenizer and a ChatML
// template, written as GGUF. Nothing it says makes sense; everything it does is what a real one does.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

struct TinyTarget {
  int64_t hidden = 64, layers = 4, heads = 4, kv_heads = 2, ffn = 96;
  int64_t extra_tokens = 0;  // unused tokens that make the vocabulary another one
  uint64_t seed = 1;
  std::string architecture = "llama";
  int64_t rotated = 0;    // rope.dimension_count; 0: the file does not say
  double rope_theta = 0;  // rope.freq_base; likewise
  double eps = 1e-5;
  std::vector<std::pair<std::string, double>> reals;  // further metadata, behind the architecture's name
  std::string spoilt;                                 // a tensor in whose middle one value is ...
  double spoiling = 0;                                // ... this one
  std::string chat_template =
      "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
};

void write_tiny_target(const std::filesystem::path& path, const TinyTarget& target = {});

// JSON lines with `n` different conversations of about `words` words an answer.
std::string tiny_rows(int n, int words, uint64_t seed = 1);
