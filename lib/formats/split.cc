#define PCRE2_CODE_UNIT_WIDTH 8
#include "formats/split.h"

#include <pcre2.h>

#include "core/error.h"

namespace dspark::formats {

namespace {

// The published patterns. `smollm` (and StarCoder's) cut digits off one by one first, then split as GPT-2 does.
constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kDigit = R"(\p{N})";
constexpr const char* kDefaultPunctuation = R"([\p{P}\$\+<=>\^~\|]+)";
constexpr const char* kDefaultGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S))";
constexpr const char* kNumbers = R"(\p{N}+)";
constexpr const char* kThreeDigits = "[0-9][0-9][0-9]";
constexpr const char* kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen35 = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N})"
                                R"(| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3 = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
                                R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kDigits3 = R"(\p{N}{1,3})";
constexpr const char* kDeepseekCjk = "[一-龥\u3040-ゟ゠-ヿ]+";
constexpr const char* kDeepseek3 =
    R"([!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)"
    R"(| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct Family {
  std::vector<std::string_view> names;  // the first one is what a tokenizer.json with these patterns is called
  SplitRule rule;
};

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {{"gpt-2", "gpt2", "mpt", "olmo", "phi-2"}, {{kGpt2}, false, false}},
      // What llama.cpp does with a file that names no rule, or this one.
      {{"default"}, {{kDefaultPunctuation, kDefaultGpt2, kNumbers, kThreeDigits}, false, false}},
      {{"smollm", "starcoder", "refact"}, {{kDigit, kGpt2}, false, false}},
      // A GGUF file does not say NFC; Qwen2's and Qwen3's published tokenizers have it, Qwen3.5's published ids do not.
      {{"qwen2"}, {{kQwen2}, true, false}},
      {{"qwen35"}, {{kQwen35}, false, false}},
      // Nor does it say ignore_merges, which Llama 3's published ids need.
      {{"llama-bpe", "llama3", "llama-v3"}, {{kLlama3}, false, true}},
      {{"gpt-4o", "o200k"}, {{kO200k}, false, false}},
      {{"deepseek-v3"}, {{kDigits3, kDeepseekCjk, kDeepseek3}, false, false}},
  };
  return all;
}

constexpr std::string_view kSpaces =
    R"(\x{09}-\x{0d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

// Oniguruma -> PCRE2: \s and \S become the exact class; what the two read differently is refused, never reinterpreted.
std::string to_pcre(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[++i];
      if (next == 's') {
        out += in_class ? std::string(kSpaces) : fmt::format("[{}]", kSpaces);
      } else if (next == 'S') {
        DS_REQUIRE(!in_class, "pre-tokenizer pattern '{}': \\S inside a character class is not supported", pattern);
        out += fmt::format("[^{}]", kSpaces);
      } else {
        out += c;
        out += next;
      }
      continue;
    }
    if (in_class) {
      DS_REQUIRE(c != '[' && !pattern.substr(i).starts_with("&&"),
                 "pre-tokenizer pattern '{}': nested or intersected character classes are not supported (at byte {})",
                 pattern, i);
      if (c == ']') in_class = false;
    } else if (c == '[') {
      in_class = true;
    }
    out += c;
  }
  return out;
}

}  // namespace

SplitRule split_rule(std::string_view pre) {
  std::string known;
  for (const Family& family : families()) {
    for (std::string_view name : family.names) {
      if (name == pre) return family.rule;
      known += known.empty() ? "" : ", ";
      known += name;
    }
  }
  fail("tokenizer: pre-tokenizer '{}' (tokenizer.ggml.pre) is not supported; known: {}", pre, known);
}

std::string split_rule_name(const std::vector<std::string>& patterns) {
  for (const Family& family : families())
    if (family.rule.patterns == patterns) return std::string(family.names[0]);
  return {};
}

struct Splitter::Impl {
  struct Pattern {
    pcre2_code* code = nullptr;
    std::string text;
  };
  std::vector<Pattern> patterns;
  ~Impl() {
    for (Pattern& p : patterns) pcre2_code_free(p.code);
  }
};

Splitter::Splitter(const std::vector<std::string>& patterns) : impl_(std::make_unique<Impl>()) {
  for (const std::string& text : patterns) {
    const std::string pcre = to_pcre(text);
    int error = 0;
    PCRE2_SIZE where = 0;
    pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre.data()), pcre.size(), PCRE2_UTF | PCRE2_UCP,
                                     &error, &where, nullptr);
    if (!code) {
      char message[256] = "";
      pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(message), sizeof message);
      fail("pre-tokenizer pattern '{}' does not compile: {} at byte {} of '{}'", text, message, where, pcre);
    }
    impl_->patterns.push_back({code, text});
    // Not an error when the library has no JIT: the interpreter gives the same matches.
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  }
}
Splitter::~Splitter() = default;
Splitter::Splitter(Splitter&&) noexcept = default;

void Splitter::split(std::string_view text, const std::function<void(size_t, size_t)>& piece) const {
  struct Free {
    void operator()(pcre2_match_data* m) const { pcre2_match_data_free(m); }
  };
  const std::unique_ptr<pcre2_match_data, Free> match(pcre2_match_data_create(1, nullptr));
  if (!match) throw std::bad_alloc();
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match.get());

  // Each level sees its piece as a text of its own: look-ahead must not see past it.
  auto cut = [&](auto& self, size_t level, size_t begin, size_t end) -> void {
    if (begin == end) return;
    if (level == impl_->patterns.size()) return piece(begin, end);
    const Impl::Pattern& pattern = impl_->patterns[level];
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data()) + begin;
    const size_t length = end - begin;
    size_t done = 0, at = 0;
    while (at < length) {
      int rc = pcre2_match(pattern.code, subject, length, at, PCRE2_NO_UTF_CHECK, match.get(), nullptr);
      if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(pattern.code, subject, length, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match.get(), nullptr);
      if (rc == PCRE2_ERROR_NOMATCH) break;
      DS_REQUIRE(rc >= 0, "pre-tokenizer pattern '{}': matching a text of {} bytes failed (PCRE2 error {})",
                 pattern.text, length, rc);
      const size_t from = range[0], to = range[1];
      DS_REQUIRE(to > from, "pre-tokenizer pattern '{}' matches the empty text", pattern.text);
      // `range` is overwritten by the levels below.
      self(self, level + 1, begin + done, begin + from);
      self(self, level + 1, begin + from, begin + to);
      done = at = to;
    }
    self(self, level + 1, begin + done, end);
  };
  cut(cut, 0, 0, text.size());
}

}  // namespace dspark::formats
