// Pre-tokenizers: how a text is cut into pieces before BPE sees it. Merges never cross a piece's border.
//
// A `SplitRule` is the published rule of one model family: regular expressions applied one after the other (each cuts
// the pieces that the ones before it left), whether the text is brought to NFC first, and whether a piece that is in
// the vocabulary is taken whole (`ignore_merges`). `Splitter` is a rule compiled; it is immutable and safe to share.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace dspark::formats {

struct SplitRule {
  std::vector<std::string> patterns;  // as published: the dialect of Oniguruma that tokenizer.json files use
  bool nfc = false;
  bool ignore_merges = false;
};

// The rule behind a GGUF file's `tokenizer.ggml.pre`; an Error lists the names that are known.
SplitRule split_rule(std::string_view pre);
// The `pre` name whose patterns these are, or "" when none has them.
std::string split_rule_name(const std::vector<std::string>& patterns);

class Splitter {
 public:
  explicit Splitter(const std::vector<std::string>& patterns);  // an Error names a pattern that can't be used
  ~Splitter();
  Splitter(Splitter&&) noexcept;

  // Calls piece(begin, end) for the pieces of `text` (well-formed UTF-8), in order; together they are the whole text.
  void split(std::string_view text, const std::function<void(size_t begin, size_t end)>& piece) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dspark::formats
