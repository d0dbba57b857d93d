#include "formats/added_tokens.h"

#include <algorithm>

#include "formats/utf8.h"

namespace dspark::formats {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)), trie_(1) {
  for (size_t t = 0; t < tokens_.size(); ++t) {
    const std::string& text = tokens_[t].text;
    if (text.empty()) continue;
    first_[static_cast<uint8_t>(text[0])] = true;
    int32_t node = 0;
    for (char c : text) {
      const auto byte = static_cast<uint8_t>(c);
      auto& next = trie_[static_cast<size_t>(node)].next;
      const auto it = std::find_if(next.begin(), next.end(), [&](const auto& n) { return n.first == byte; });
      if (it != next.end()) {
        node = it->second;
      } else {
        node = static_cast<int32_t>(trie_.size());
        next.emplace_back(byte, node);
        trie_.emplace_back();
      }
    }
    trie_[static_cast<size_t>(node)].token = static_cast<int32_t>(t);
  }
}

const AddedToken* AddedTokens::longest_at(std::string_view text, size_t at) const {
  const AddedToken* best = nullptr;
  int32_t node = 0;
  for (size_t i = at;; ++i) {
    const Node& n = trie_[static_cast<size_t>(node)];
    if (n.token >= 0) best = &tokens_[static_cast<size_t>(n.token)];
    if (i == text.size()) return best;
    const auto it = std::find_if(n.next.begin(), n.next.end(),
                                 [&](const auto& next) { return next.first == static_cast<uint8_t>(text[i]); });
    if (it == n.next.end()) return best;
    node = it->second;
  }
}

namespace {

size_t last_character(std::string_view text) {  // where the last character of a non-empty text begins
  size_t i = text.size() - 1;
  while (i > 0 && (static_cast<uint8_t>(text[i]) & 0xC0) == 0x80) --i;
  return i;
}

bool ends_with_word(std::string_view text) {
  return !text.empty() && is_word(utf8_step(text, last_character(text)).code);
}
bool starts_with_word(std::string_view text) { return !text.empty() && is_word(utf8_step(text, 0).code); }

}  // namespace

void AddedTokens::split(std::string_view text, bool parse_special,
                        const std::function<void(int32_t, size_t, size_t)>& part) const {
  size_t done = 0;
  for (size_t i = 0; i < text.size();) {
    const AddedToken* token = first_[static_cast<uint8_t>(text[i])] ? longest_at(text, i) : nullptr;
    if (!token) {
      ++i;
      continue;
    }
    size_t begin = i, end = i + token->text.size();
    i = end;  // a match that is not taken is plain text, all of it
    if (token->special && !parse_special) continue;
    if (token->single_word && (ends_with_word(text.substr(0, begin)) || starts_with_word(text.substr(end)))) continue;
    if (token->lstrip) {
      while (begin > done) {
        const size_t character = last_character(text.substr(0, begin));
        if (!is_white_space(utf8_step(text, character).code)) break;
        begin = character;
      }
    }
    if (token->rstrip) {
      while (end < text.size()) {
        const Utf8Step step = utf8_step(text, end);
        if (!is_white_space(step.code)) break;
        end += step.bytes;
      }
      i = end;
    }
    if (done < begin) part(-1, done, begin);
    part(token->id, begin, end);
    done = end;
  }
  if (done < text.size()) part(-1, done, text.size());
}

}  // namespace dspark::formats
