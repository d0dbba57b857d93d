// Byte-level BPE on one piece: start from single bytes, merge the neighbouring pair of the lowest rank (the leftmost of
// equals) until no pair has one. Immutable but for its cache of pieces; safe to share between threads.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace dspark::formats {

struct MergeRule {
  int32_t left, right, merged;  // the rank is the position in the list
};

class Bpe {
 public:
  // byte_ids[b] is the token of the single byte b, or -1 when the vocabulary has none.
  Bpe(const std::array<int32_t, 256>& byte_ids, std::span<const MergeRule> merges);
  ~Bpe();
  Bpe(Bpe&&) noexcept;

  // Appends the piece's ids. A byte without a token gives `unknown`, or nothing when `unknown` < 0.
  void encode(std::string_view piece, int32_t unknown, std::vector<int32_t>& ids) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dspark::formats
