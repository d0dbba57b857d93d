// Added tokens: those that are looked for in the text itself before it is split and merged (leftmost first, the longest
// of those that start there).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dspark::formats {

struct AddedToken {
  std::string text;
  int32_t id;
  bool special;  // a control token: only matched when special tokens are parsed
  bool lstrip = false, rstrip = false, single_word = false;
};

class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }
  // Calls part(id, begin, end) for the whole text in order; id is -1 for the text between matches (never empty).
  void split(std::string_view text, bool parse_special,
             const std::function<void(int32_t id, size_t begin, size_t end)>& part) const;

 private:
  struct Node {
    int32_t token = -1;                             // index into tokens_
    std::vector<std::pair<uint8_t, int32_t>> next;  // by byte
  };
  const AddedToken* longest_at(std::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> trie_;
  bool first_[256] = {};
};

}  // namespace dspark::formats
