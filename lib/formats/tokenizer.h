// Tokenizers: text <-> token ids, exactly as the target's own tokenizer does it.
//
// `TokenizerData` is what a file says (a GGUF file's metadata or a tokenizer.json); `Tokenizer` is that made ready.
// Today that is byte-level BPE (GPT-2, SmolLM, Qwen, Llama 3, DeepSeek, o200k); SentencePiece models are refused by
// name. A Tokenizer never changes after construction and may be used from many threads.
//
// Encoding: added tokens are found in the text first (control tokens only with `parse_special`; user-defined ones
// always), the rest is normalised, cut into pieces, and merged. Ill-formed UTF-8 becomes U+FFFD first.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/split.h"

namespace dspark::formats {

class Gguf;

// The numbers of GGUF's tokenizer.ggml.token_type.
enum class TokenType : int8_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

// How an added token is matched (tokenizer.json only; a GGUF file has none of these).
struct AddedFlags {
  int32_t id;
  bool lstrip = false, rstrip = false;  // the match takes the white space on that side with it
  bool single_word = false;             // only where no word character touches it
  bool normalised = false;              // found in the normalised text instead of the raw one
};

struct TokenizerData {
  std::string model = "gpt2";       // tokenizer.ggml.model: gpt2 is byte-level BPE
  std::string pre = "default";      // tokenizer.ggml.pre
  std::optional<SplitRule> split;   // set: used instead of what `pre` means
  std::vector<std::string> tokens;  // by id; byte-level spelling for normal tokens, plain text for the others
  std::vector<TokenType> types;     // by id
  std::vector<std::string> merges;  // "left right", in order of rank
  std::vector<float> scores;        // by id or empty (SentencePiece)
  std::vector<AddedFlags> flags;    // of those added tokens that have any
  int32_t bos = -1, eos = -1, eot = -1, eom = -1, pad = -1, unk = -1, mask = -1;
  int32_t unknown_byte = -1;  // given for a byte that no token spells; -1: it is left out, as published
  bool add_bos = false, add_eos = false;
  std::string chat_template;  // empty: none
};

struct EncodeOptions {
  bool parse_special = true;  // control tokens spelled out in the text become their ids
  bool add_special = false;   // bos and eos where the tokenizer adds them (chat templates write their own)
};

struct Encoding {
  std::vector<int32_t> ids;
  // The bytes [begin, end) of the text behind each id. A token that is part of a character (or of a group of characters
  // that NFC changed) has the range of its bytes where they are known, else of the whole group.
  std::vector<std::pair<size_t, size_t>> spans;
};

class Tokenizer {
 public:
  explicit Tokenizer(TokenizerData data);  // an Error says what is wrong with it
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  std::vector<int32_t> encode(std::string_view text, EncodeOptions options = {}) const;
  // Spans refer to `text` when it is well-formed UTF-8, else to utf8_lossy(text).
  Encoding encode_spans(std::string_view text, EncodeOptions options = {}) const;

  // The text of the ids: their bytes joined, ill-formed parts replaced by U+FFFD. `skip_special` leaves control tokens
  // out. An id outside the vocabulary is an Error.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;
  std::string_view piece(int32_t id) const;  // the bytes of one token (part of a character, perhaps)

  int32_t size() const;
  TokenType type(int32_t id) const;
  const std::string& text(int32_t id) const;                 // as the vocabulary spells it
  std::optional<int32_t> find(std::string_view text) const;  // the id spelled so
  int32_t bos() const;                                       // -1: none; so for the next ones
  int32_t eos() const;
  int32_t pad() const;
  int32_t unk() const;
  bool add_bos() const;
  const std::string& chat_template() const;

  // Tokens that end a generation (end of turn, of message, of text), ascending.
  const std::vector<int32_t>& end_tokens() const;
  bool is_end(int32_t id) const;
  // The drafter's mask token unless the user names one: the tokenizer's own, else its last control or unused token that
  // has no other job (ids above, end tokens, chat template). -1: there is none.
  int32_t default_mask_token() const;
  // Lower-case hex SHA-256 over vocabulary, types, merges and split rule: equal hashes mean equal ids for every text.
  const std::string& identity() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Decodes a stream of ids: text comes out as soon as it is certain; the bytes of a cut character are held back.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = true)
      : tokenizer_(tokenizer), skip_special_(skip_special) {}
  std::string push(int32_t id);
  std::string finish();  // what was held back, as U+FFFD

 private:
  const Tokenizer& tokenizer_;
  bool skip_special_;
  std::string held_;
};

// Reads a Hugging Face tokenizer.json (byte-level BPE), and tokenizer_config.json and chat_template.jinja beside it
// where they exist. What it can't follow exactly is an Error that names the file and the part.
TokenizerData read_tokenizer_json(const std::filesystem::path& path);

// The tokenizer inside a GGUF file (tokenizer.ggml.*, tokenizer.chat_template).
TokenizerData read_tokenizer_gguf(const Gguf& file);
Tokenizer tokenizer_from_gguf(const Gguf& file);

// A target's tokenizer: of a .gguf file, or of a folder with tokenizer.json.
Tokenizer load_tokenizer(const std::filesystem::path& target);

}  // namespace dspark::formats
