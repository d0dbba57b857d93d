// Reads Hugging Face's tokenizer.json. Every part of the pipeline is either followed exactly or refused by name.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "formats/tokenizer.h"

namespace dspark::formats {

namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 22;
constexpr int kMaxNesting = 8;  // of Sequence steps; published files have one level

// A value of the expected kind, or an Error that names the file and the key.
template <typename T>
T get(const Json& object, const char* key, const fs::path& path) {
  try {
    return object.at(key).get<T>();
  } catch (const nlohmann::json::exception& e) {
    fail("{}: key '{}': {}", path.string(), key, json_error(e));
  }
}

template <typename T>
T get_or(const Json& object, const char* key, T missing, const fs::path& path) {
  if (!object.is_object() || !object.contains(key) || object.at(key).is_null()) return missing;
  return get<T>(object, key, path);
}

bool has(const Json& object, const char* key) {
  return object.is_object() && object.contains(key) && !object.at(key).is_null();
}

void put_token(TokenizerData& data, int64_t id, const std::string& text, TokenType type, const fs::path& path) {
  DS_REQUIRE(id >= 0 && id < kMaxTokens, "{}: token '{}' has the id {}, expected 0 to {}", path.string(), text, id,
             kMaxTokens - 1);
  const auto i = static_cast<size_t>(id);
  if (i >= data.tokens.size()) {
    data.tokens.resize(i + 1);
    data.types.resize(i + 1, TokenType::unused);  // ids that the file leaves out
  }
  data.tokens[i] = text;
  data.types[i] = type;
}

void check_depth(int depth, const fs::path& path) {
  DS_REQUIRE(depth <= kMaxNesting, "{}: Sequence steps nest more than {} deep", path.string(), kMaxNesting);
}

// The normalizer: none or NFC.
bool read_normalizer(const Json& part, const fs::path& path, int depth = 0) {
  check_depth(depth, path);
  if (part.is_null()) return false;
  const auto type = get<std::string>(part, "type", path);
  if (type == "NFC") return true;
  if (type == "Sequence") {
    bool nfc = false;
    for (const Json& inner : part.at("normalizers")) nfc |= read_normalizer(inner, path, depth + 1);
    return nfc;
  }
  fail("{}: normalizer '{}' is not supported (NFC or none is)", path.string(), type);
}

void read_pre_tokenizer(const Json& part, std::vector<std::string>& patterns, bool& byte_level, const fs::path& path,
                        int depth = 0) {
  check_depth(depth, path);
  DS_REQUIRE(!part.is_null(), "{}: no pre_tokenizer: not byte-level BPE (SentencePiece models are not supported yet)",
             path.string());
  const auto type = get<std::string>(part, "type", path);
  if (type == "Sequence") {
    for (const Json& inner : part.at("pretokenizers")) read_pre_tokenizer(inner, patterns, byte_level, path, depth + 1);
  } else if (type == "ByteLevel") {
    DS_REQUIRE(!get_or(part, "add_prefix_space", false, path), "{}: ByteLevel with add_prefix_space is not supported",
               path.string());
    if (get_or(part, "use_regex", true, path)) patterns.push_back(split_rule("gpt-2").patterns[0]);
    byte_level = true;
  } else if (type == "Digits") {
    patterns.push_back(get_or(part, "individual_digits", false, path) ? R"(\p{N})" : R"(\p{N}+)");
  } else if (type == "Split") {
    const auto behavior = get<std::string>(part, "behavior", path);
    DS_REQUIRE(behavior == "Isolated" && !get_or(part, "invert", false, path),
               "{}: pre-tokenizer Split with behavior '{}' or invert is not supported (Isolated is)", path.string(),
               behavior);
    const Json& pattern = part.at("pattern");
    DS_REQUIRE(has(pattern, "Regex"), "{}: pre-tokenizer Split without a Regex is not supported", path.string());
    patterns.push_back(get<std::string>(pattern, "Regex", path));
  } else {
    fail("{}: pre-tokenizer '{}' is not supported", path.string(), type);
  }
}

// Which tokens the post-processor puts around a text: at most one bos and one eos.
void read_post_processor(const Json& part, TokenizerData& data, const fs::path& path, int depth = 0) {
  check_depth(depth, path);
  if (part.is_null()) return;
  const auto type = get<std::string>(part, "type", path);
  if (type == "ByteLevel") return;  // offsets only
  if (type == "Sequence") {
    for (const Json& inner : part.at("processors")) read_post_processor(inner, data, path, depth + 1);
    return;
  }
  DS_REQUIRE(type == "TemplateProcessing", "{}: post-processor '{}' is not supported", path.string(), type);
  bool after = false;
  for (const Json& item : part.at("single")) {
    if (item.contains("Sequence")) {
      after = true;
      continue;
    }
    const auto name = item.at("SpecialToken").at("id").get<std::string>();
    const Json& ids = part.at("special_tokens").at(name).at("ids");
    int32_t& slot = after ? data.eos : data.bos;
    bool& add = after ? data.add_eos : data.add_bos;
    DS_REQUIRE(ids.size() == 1 && !add, "{}: the post-processor adds several tokens on one side; not supported",
               path.string());
    slot = ids[0].get<int32_t>();
    add = true;
  }
}

void read_model(const Json& model, TokenizerData& data, const fs::path& path) {
  const auto type = get_or<std::string>(model, "type", "BPE", path);
  DS_REQUIRE(type == "BPE", "{}: model '{}' is not supported (byte-level BPE is)", path.string(), type);
  DS_REQUIRE(!get_or(model, "byte_fallback", false, path),
             "{}: BPE with byte fallback is a SentencePiece model, which is not supported yet", path.string());
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"})
    DS_REQUIRE(get_or<std::string>(model, affix, "", path).empty(), "{}: BPE with {} is not supported", path.string(),
               affix);
  const Json& vocab = model.at("vocab");
  DS_REQUIRE(vocab.is_object() && !vocab.empty(), "{}: model.vocab is not an object with tokens", path.string());
  for (const auto& [text, id] : vocab.items()) put_token(data, id.get<int64_t>(), text, TokenType::normal, path);
  for (const Json& merge : model.at("merges"))
    data.merges.push_back(merge.is_array() ? merge.at(0).get<std::string>() + " " + merge.at(1).get<std::string>()
                                           : merge.get<std::string>());
  if (has(model, "unk_token"))
    data.unk = data.unknown_byte = vocab.at(model.at("unk_token").get<std::string>()).get<int32_t>();
}

void read_config(const fs::path& path, TokenizerData& data) {
  const Json config = read_json(path);
  auto token = [&](const char* key, int32_t& slot) {
    if (!has(config, key)) return;
    const Json& value = config.at(key);  // a string, or an object with `content`
    const auto text =
        value.is_object() ? get<std::string>(value, "content", path) : get<std::string>(config, key, path);
    const auto it = std::find(data.tokens.begin(), data.tokens.end(), text);
    DS_REQUIRE(it != data.tokens.end(), "{}: {} is '{}', which tokenizer.json does not know", path.string(), key, text);
    slot = static_cast<int32_t>(it - data.tokens.begin());
  };
  token("bos_token", data.bos);
  token("eos_token", data.eos);
  token("pad_token", data.pad);
  token("unk_token", data.unk);
  token("mask_token", data.mask);
  if (has(config, "chat_template")) {
    const Json& templates = config.at("chat_template");  // a string, or a list of {name, template}
    if (templates.is_string()) data.chat_template = templates.get<std::string>();
    if (templates.is_array())
      for (const Json& item : templates)
        if (get_or<std::string>(item, "name", "", path) == "default")
          data.chat_template = get<std::string>(item, "template", path);
  }
}

}  // namespace

TokenizerData read_tokenizer_json(const fs::path& path) {
  const Json root = read_json(path);
  DS_REQUIRE(has(root, "model"), "{}: no key 'model': not a tokenizer.json", path.string());
  TokenizerData data;
  SplitRule split;
  try {
    read_model(root.at("model"), data, path);
    split.ignore_merges = get_or(root.at("model"), "ignore_merges", false, path);
    if (has(root, "normalizer")) split.nfc = read_normalizer(root.at("normalizer"), path);
    bool byte_level = false;
    read_pre_tokenizer(root.value("pre_tokenizer", Json()), split.patterns, byte_level, path);
    DS_REQUIRE(byte_level, "{}: its pre-tokenizer has no ByteLevel step: not byte-level BPE", path.string());
    for (const Json& added : root.value("added_tokens", Json::array())) {
      const auto id = get<int64_t>(added, "id", path);
      const bool special = get_or(added, "special", false, path);
      put_token(data, id, get<std::string>(added, "content", path),
                special ? TokenType::control : TokenType::user_defined, path);
      const AddedFlags flags{static_cast<int32_t>(id), get_or(added, "lstrip", false, path),
                             get_or(added, "rstrip", false, path), get_or(added, "single_word", false, path),
                             get_or(added, "normalized", false, path)};
      if (flags.lstrip || flags.rstrip || flags.single_word || flags.normalised) data.flags.push_back(flags);
    }
    read_post_processor(root.value("post_processor", Json()), data, path);
  } catch (const nlohmann::json::exception& e) {
    fail("{}: not a tokenizer.json as expected: {}", path.string(), json_error(e));
  }
  data.pre = split_rule_name(split.patterns);
  data.split = std::move(split);
  if (const fs::path config = path.parent_path() / "tokenizer_config.json"; fs::exists(config))
    read_config(config, data);
  if (const fs::path jinja = path.parent_path() / "chat_template.jinja"; fs::exists(jinja))
    data.chat_template = read_text(jinja);
  return data;
}

}  // namespace dspark::formats
