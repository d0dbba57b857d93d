// Reads the tokenizer of a GGUF file.
#include "core/error.h"
#include "core/files.h"
#include "formats/gguf.h"
#include "formats/tokenizer.h"

namespace dspark::formats {

TokenizerData read_tokenizer_gguf(const Gguf& file) {
  const std::string path = file.path().string();
  DS_REQUIRE(file.has("tokenizer.ggml.model"), "{}: it holds no tokenizer (no key tokenizer.ggml.model)", path);
  TokenizerData data;
  data.model = file.string("tokenizer.ggml.model");
  DS_REQUIRE(
      data.model == "gpt2",
      "{}: tokenizer model '{}' is not supported yet (only byte-level BPE, 'gpt2'; SentencePiece models are not)", path,
      data.model);
  data.pre = file.string("tokenizer.ggml.pre", "default");
  for (std::string_view token : file.strings("tokenizer.ggml.tokens")) data.tokens.emplace_back(token);
  for (std::string_view merge : file.strings("tokenizer.ggml.merges")) data.merges.emplace_back(merge);
  if (file.has("tokenizer.ggml.token_type"))
    for (int64_t type : file.integers("tokenizer.ggml.token_type")) {
      DS_REQUIRE(type >= 1 && type <= 6, "{}: tokenizer.ggml.token_type holds {}, expected 1 to 6", path, type);
      data.types.push_back(static_cast<TokenType>(type));
    }
  if (file.has("tokenizer.ggml.scores"))
    for (double score : file.numbers("tokenizer.ggml.scores")) data.scores.push_back(static_cast<float>(score));
  auto id = [&](const char* key) {
    const std::string full = fmt::format("tokenizer.ggml.{}", key);
    const int64_t value = file.integer(full, -1);
    DS_REQUIRE(value >= -1 && value < static_cast<int64_t>(data.tokens.size()),
               "{}: {} is {}, the vocabulary has {} tokens", path, full, value, data.tokens.size());
    return static_cast<int32_t>(value);
  };
  data.bos = id("bos_token_id");
  data.eos = id("eos_token_id");
  data.eot = id("eot_token_id");
  data.eom = id("eom_token_id");
  data.pad = id("padding_token_id");
  data.unk = id("unknown_token_id");
  data.mask = id("mask_token_id");
  data.add_bos = file.boolean("tokenizer.ggml.add_bos_token", false);
  data.add_eos = file.boolean("tokenizer.ggml.add_eos_token", false);
  data.chat_template = file.string("tokenizer.chat_template", "");
  return data;
}

namespace {

// The layers below know what is wrong, not in which file.
Tokenizer make_named(TokenizerData data, const fs::path& path) {
  try {
    return Tokenizer(std::move(data));
  } catch (const Error& e) {
    throw Error(fmt::format("{}: {}", path.string(), e.what()), e.code());
  }
}

}  // namespace

Tokenizer tokenizer_from_gguf(const Gguf& file) { return make_named(read_tokenizer_gguf(file), file.path()); }

Tokenizer load_tokenizer(const std::filesystem::path& target) {
  if (fs::is_directory(target)) {
    const fs::path json = target / "tokenizer.json";
    DS_REQUIRE(fs::exists(json), "{}: no tokenizer.json in this folder", target.string());
    return make_named(read_tokenizer_json(json), json);
  }
  DS_REQUIRE(target.extension() == ".gguf", "{}: neither a folder nor a .gguf file", target.string());
  return tokenizer_from_gguf(Gguf(target));
}

}  // namespace dspark::formats
