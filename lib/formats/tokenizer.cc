#include "formats/tokenizer.h"

#include <algorithm>
#include <unordered_map>

#include "core/error.h"
#include "core/hash.h"
#include "formats/added_tokens.h"
#include "formats/bpe.h"
#include "formats/byte_level.h"
#include "formats/utf8.h"

namespace dspark::formats {

namespace {

// Names that end a generation wherever they are control tokens, whatever else a file says (many name only one end).
constexpr std::string_view kEndNames[] = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|endofturn|>",
    "<EOT>",
    "</s>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "<eos>",
};

TokenizerData check(TokenizerData data) {
  const size_t n = data.tokens.size();
  DS_REQUIRE(data.model == "gpt2",
             "tokenizer: model '{}' is not supported yet (only byte-level BPE, 'gpt2'; SentencePiece models are not)",
             data.model);
  DS_REQUIRE(n > 0 && n < (size_t{1} << 30), "tokenizer: a vocabulary of {} tokens", n);
  if (data.types.empty()) data.types.assign(n, TokenType::normal);
  DS_REQUIRE(data.types.size() == n, "tokenizer: {} tokens but {} token types", n, data.types.size());
  const std::pair<const char*, int32_t> ids[] = {
      {"bos", data.bos},     {"eos", data.eos},     {"eot", data.eot},   {"eom", data.eom},
      {"padding", data.pad}, {"unknown", data.unk}, {"mask", data.mask}, {"unknown byte", data.unknown_byte}};
  for (const auto& [name, id] : ids)
    DS_REQUIRE(id >= -1 && id < static_cast<int64_t>(n),
               "tokenizer: the {} token id is {}, the vocabulary has {} tokens", name, id, n);
  DS_REQUIRE(!data.add_bos || data.bos >= 0, "tokenizer: it adds a bos token but names none");
  DS_REQUIRE(!data.add_eos || data.eos >= 0, "tokenizer: it adds an eos token but names none");
  if (!data.split) data.split = split_rule(data.pre);
  return data;
}

std::vector<int32_t> find_end_tokens(const TokenizerData& data,
                                     const std::unordered_map<std::string_view, int32_t>& ids) {
  std::vector<int32_t> ends;
  for (int32_t id : {data.eos, data.eot, data.eom})
    if (id >= 0) ends.push_back(id);
  // Harmony ends its messages with <|end|> and goes on to the next one; only <|return|> and <|call|> end a generation.
  const bool harmony = ids.contains("<|return|>") && ids.contains("<|call|>");
  for (std::string_view name : kEndNames) {
    const auto it = ids.find(name);
    if (it == ids.end() || data.types[static_cast<size_t>(it->second)] != TokenType::control) continue;
    if (harmony && name == "<|end|>") continue;
    ends.push_back(it->second);
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  return ends;
}

std::string hash_identity(const TokenizerData& data) {
  std::string all;
  auto add = [&](std::string_view field) {  // length first: no two different lists give the same bytes
    const uint64_t n = field.size();
    for (int shift = 0; shift < 64; shift += 8) all += static_cast<char>(n >> shift & 0xFF);
    all += field;
  };
  add(data.model);
  add(data.split->nfc ? "nfc" : "");
  add(data.split->ignore_merges ? "ignore_merges" : "");
  for (const auto& pattern : data.split->patterns) add(pattern);
  add("tokens");
  for (size_t i = 0; i < data.tokens.size(); ++i) {
    add(data.tokens[i]);
    all += static_cast<char>(data.types[i]);
  }
  add("merges");
  for (const auto& merge : data.merges) add(merge);
  add("flags");
  for (const AddedFlags& f : data.flags)
    add(fmt::format("{} {} {} {} {}", f.id, f.lstrip, f.rstrip, f.single_word, f.normalised));
  return sha256_hex(all);
}

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(TokenizerData checked);

  TokenizerData data;
  std::vector<std::string> pieces;                      // by id: bytes
  std::unordered_map<std::string_view, int32_t> ids;    // by spelling; views into data.tokens
  std::unordered_map<std::string_view, int32_t> whole;  // by bytes, normal tokens only; filled for ignore_merges
  std::vector<int32_t> ends;
  std::string identity;
  Splitter splitter;
  std::unique_ptr<Bpe> bpe;
  std::unique_ptr<AddedTokens> raw_added, normalised_added;

  template <typename Emit>
  void encode(std::string_view text, EncodeOptions options, const Emit& emit) const;
};

Tokenizer::Impl::Impl(TokenizerData checked) : data(std::move(checked)), splitter(data.split->patterns) {
  const size_t n = data.tokens.size();
  pieces.reserve(n);
  ids.reserve(n);
  std::array<int32_t, 256> byte_ids;
  byte_ids.fill(-1);
  std::unordered_map<int32_t, AddedFlags> flags;
  for (const AddedFlags& f : data.flags) {
    DS_REQUIRE(f.id >= 0 && static_cast<size_t>(f.id) < n, "tokenizer: added token {} is outside the vocabulary of {}",
               f.id, n);
    flags[f.id] = f;
  }
  std::vector<AddedToken> raw, normalised;
  for (size_t i = 0; i < n; ++i) {
    const std::string& token = data.tokens[i];
    const TokenType type = data.types[i];
    const auto id = static_cast<int32_t>(i);
    DS_REQUIRE(type >= TokenType::normal && type <= TokenType::byte, "tokenizer: token {} '{}' has the unknown type {}",
               i, token, static_cast<int>(type));
    const bool special = type == TokenType::control || type == TokenType::unknown;
    if (special || type == TokenType::user_defined) {
      AddedToken added{token, id, special};
      bool in_normalised = false;
      if (const auto it = flags.find(id); it != flags.end()) {
        added.lstrip = it->second.lstrip, added.rstrip = it->second.rstrip;
        added.single_word = it->second.single_word;
        in_normalised = it->second.normalised;
      }
      (in_normalised ? normalised : raw).push_back(std::move(added));
      pieces.push_back(token);
    } else {
      pieces.push_back(bytes_of_spelling(token));
      if (type == TokenType::normal && pieces.back().size() == 1) byte_ids[static_cast<uint8_t>(pieces.back()[0])] = id;
    }
    // A later duplicate never replaces the first: files pad with repeated names.
    ids.emplace(token, id);
  }
  if (data.split->ignore_merges)
    for (size_t i = 0; i < n; ++i)
      if (data.types[i] == TokenType::normal) whole.emplace(pieces[i], static_cast<int32_t>(i));

  std::vector<MergeRule> merges;
  merges.reserve(data.merges.size());
  for (size_t rank = 0; rank < data.merges.size(); ++rank) {
    const std::string_view merge = data.merges[rank];
    const size_t space = merge.find(' ', 1);
    DS_REQUIRE(space != std::string_view::npos, "tokenizer: merge {} is '{}', expected two tokens with a space between",
               rank, merge);
    const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
    const std::string joined = fmt::format("{}{}", left, right);
    auto id_of = [&](std::string_view name) {
      const auto it = ids.find(name);
      DS_REQUIRE(it != ids.end(), "tokenizer: merge {} '{}' needs the token '{}', which the vocabulary lacks", rank,
                 merge, name);
      return it->second;
    };
    merges.push_back({id_of(left), id_of(right), id_of(joined)});
  }
  bpe = std::make_unique<Bpe>(byte_ids, merges);
  raw_added = std::make_unique<AddedTokens>(std::move(raw));
  normalised_added = std::make_unique<AddedTokens>(std::move(normalised));
  ends = find_end_tokens(data, ids);
  identity = hash_identity(data);
}

// emit(id, begin, end): an id and the range of `text` (well-formed) behind it.
template <typename Emit>
void Tokenizer::Impl::encode(std::string_view text, EncodeOptions options, const Emit& emit) const {
  std::vector<int32_t> scratch;
  // Pieces of one stretch of normalised text; place(begin, end) turns its offsets into those of `text`.
  auto encode_plain = [&](std::string_view plain, const auto& place) {
    splitter.split(plain, [&](size_t begin, size_t end) {
      const std::string_view piece = plain.substr(begin, end - begin);
      if (data.split->ignore_merges) {
        if (const auto it = whole.find(piece); it != whole.end()) {
          const auto [b, e] = place(begin, end);
          return emit(it->second, b, e);
        }
      }
      scratch.clear();
      bpe->encode(piece, data.unknown_byte, scratch);
      size_t bytes = 0;
      for (int32_t id : scratch) bytes += pieces[static_cast<size_t>(id)].size();
      const bool exact = bytes == piece.size();  // not so where a byte has no token
      size_t at = begin;
      for (int32_t id : scratch) {
        const size_t next = at + pieces[static_cast<size_t>(id)].size();
        const auto [b, e] = exact ? place(at, next) : place(begin, end);
        emit(id, b, e);
        at = next;
      }
    });
  };
  raw_added->split(text, options.parse_special, [&](int32_t added, size_t begin, size_t end) {
    if (added >= 0) return emit(added, begin, end);
    const std::string_view part = text.substr(begin, end - begin);
    if (!data.split->nfc && normalised_added->empty()) {
      const auto place = [&](size_t b, size_t e) { return std::pair{begin + b, begin + e}; };
      return encode_plain(part, place);
    }
    const Normalised normal = data.split->nfc ? normalise_nfc(part) : Normalised{std::string(part), {}};
    normalised_added->split(normal.text, options.parse_special, [&](int32_t id, size_t from, size_t to) {
      const auto place = [&](size_t b, size_t e) {
        const auto range = normal.source_range(from + b, from + e);
        return std::pair{begin + range.first, begin + range.second};
      };
      if (id >= 0) {
        const auto [b, e] = place(0, to - from);
        return emit(id, b, e);
      }
      encode_plain(std::string_view(normal.text).substr(from, to - from), place);
    });
  });
}

Tokenizer::Tokenizer(TokenizerData data) : impl_(std::make_unique<Impl>(check(std::move(data)))) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

std::vector<int32_t> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  if (!utf8_valid(text)) return encode(utf8_lossy(text), options);
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 2);
  if (options.add_special && impl_->data.add_bos) ids.push_back(impl_->data.bos);
  impl_->encode(text, options, [&](int32_t id, size_t, size_t) { ids.push_back(id); });
  if (options.add_special && impl_->data.add_eos) ids.push_back(impl_->data.eos);
  return ids;
}

Encoding Tokenizer::encode_spans(std::string_view text, EncodeOptions options) const {
  if (!utf8_valid(text)) return encode_spans(utf8_lossy(text), options);
  Encoding out;
  auto add = [&](int32_t id, size_t begin, size_t end) {
    out.ids.push_back(id);
    out.spans.emplace_back(begin, end);
  };
  if (options.add_special && impl_->data.add_bos) add(impl_->data.bos, 0, 0);
  impl_->encode(text, options, add);
  if (options.add_special && impl_->data.add_eos) add(impl_->data.eos, text.size(), text.size());
  return out;
}

std::string_view Tokenizer::piece(int32_t id) const {
  DS_REQUIRE(id >= 0 && id < size(), "tokenizer: token id {} is outside the vocabulary of {}", id, size());
  return impl_->pieces[static_cast<size_t>(id)];
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (int32_t id : ids) {
    const std::string_view p = piece(id);
    if (!skip_special || type(id) != TokenType::control) bytes += p;
  }
  return utf8_lossy(bytes);
}

int32_t Tokenizer::size() const { return static_cast<int32_t>(impl_->data.tokens.size()); }
TokenType Tokenizer::type(int32_t id) const {
  DS_REQUIRE(id >= 0 && id < size(), "tokenizer: token id {} is outside the vocabulary of {}", id, size());
  return impl_->data.types[static_cast<size_t>(id)];
}
const std::string& Tokenizer::text(int32_t id) const {
  DS_REQUIRE(id >= 0 && id < size(), "tokenizer: token id {} is outside the vocabulary of {}", id, size());
  return impl_->data.tokens[static_cast<size_t>(id)];
}
std::optional<int32_t> Tokenizer::find(std::string_view text) const {
  const auto it = impl_->ids.find(text);
  return it == impl_->ids.end() ? std::nullopt : std::optional(it->second);
}
int32_t Tokenizer::bos() const { return impl_->data.bos; }
int32_t Tokenizer::eos() const { return impl_->data.eos; }
int32_t Tokenizer::pad() const { return impl_->data.pad; }
int32_t Tokenizer::unk() const { return impl_->data.unk; }
bool Tokenizer::add_bos() const { return impl_->data.add_bos; }
const std::string& Tokenizer::chat_template() const { return impl_->data.chat_template; }
const std::vector<int32_t>& Tokenizer::end_tokens() const { return impl_->ends; }
bool Tokenizer::is_end(int32_t id) const { return std::binary_search(impl_->ends.begin(), impl_->ends.end(), id); }
const std::string& Tokenizer::identity() const { return impl_->identity; }

int32_t Tokenizer::default_mask_token() const {
  const TokenizerData& d = impl_->data;
  if (d.mask >= 0) return d.mask;
  for (int32_t id = size() - 1; id >= 0; --id) {
    const TokenType t = type(id);
    if (t != TokenType::control && t != TokenType::unused) continue;
    if (id == d.bos || id == d.eos || id == d.pad || id == d.unk || is_end(id)) continue;
    const std::string& name = text(id);
    if (name.empty() || d.chat_template.find(name) != std::string::npos) continue;
    return id;
  }
  return -1;
}

std::string StreamDecoder::push(int32_t id) {
  const std::string_view piece = tokenizer_.piece(id);
  if (skip_special_ && tokenizer_.type(id) == TokenType::control) return {};
  held_ += piece;
  std::string out;
  size_t i = 0;
  while (i < held_.size()) {
    const Utf8Step step = utf8_step(held_, i);
    if (step.cut) break;
    out.append(step.ok ? std::string_view(held_).substr(i, step.bytes) : kReplacement);
    i += step.bytes;
  }
  held_.erase(0, i);
  return out;
}

std::string StreamDecoder::finish() { return utf8_lossy(std::exchange(held_, {})); }

}  // namespace dspark::formats
