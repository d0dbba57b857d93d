#include "formats/store_identity.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"

namespace dspark::formats {
namespace {

std::string join(const std::vector<int>& v) {
  std::string s;
  for (int x : v) s += fmt::format("{}{}", s.empty() ? "" : " ", x);
  return s.empty() ? "none" : s;
}

std::string quoted(const std::string& s) { return s.empty() ? "unknown" : "'" + s + "'"; }

LastState last_state_from_name(const std::string& name, std::string_view where) {
  if (name == "pre_norm") return LastState::pre_norm;
  DS_REQUIRE(name == "post_norm", "{}: last_state '{}', expected pre_norm or post_norm", where, name);
  return LastState::post_norm;
}

}  // namespace

std::string_view last_state_name(LastState v) { return v == LastState::pre_norm ? "pre_norm" : "post_norm"; }

std::string_view codec_name(StoreCodec v) {
  switch (v) {
    case StoreCodec::raw:
      return "raw";
    case StoreCodec::zstd:
      return "zstd";
    case StoreCodec::fp8:
      return "fp8";
  }
  return "unknown";
}

StoreCodec codec_from_name(std::string_view name) {
  for (StoreCodec c : {StoreCodec::raw, StoreCodec::zstd, StoreCodec::fp8})
    if (name == codec_name(c)) return c;
  fail_usage("no codec '{}'; there are raw, zstd (lossless) and fp8 (lossy)", name);
}

void check_identity(const StoreIdentity& id, std::string_view where) {
  DS_REQUIRE(id.hidden_size > 0 && id.hidden_size <= (int64_t{1} << 20), "{}: hidden size {} is out of range", where,
             id.hidden_size);
  DS_REQUIRE(id.vocab_size >= 0, "{}: vocabulary {} is out of range", where, id.vocab_size);
  DS_REQUIRE(id.taps.size() < 1000, "{}: {} taps are too many", where, id.taps.size());
  for (size_t i = 0; i < id.taps.size(); ++i) {
    if (id.taps[i] == kUnknownTap) continue;
    DS_REQUIRE(id.taps[i] >= 0 && (i == 0 || id.taps[i] > id.taps[i - 1]),
               "{}: taps {} are not ascending layer numbers", where, join(id.taps));
  }
}

std::string identity_difference(const StoreIdentity& asked, const StoreIdentity& found, IdentityCompare compare, std::string_view asked_word,
                                std::string_view found_word) {
  std::string out;
  const auto add = [&](std::string_view what, const std::string& a, const std::string& f) {
    if (a != f) out += fmt::format("{}{}: {} {}, {} {}", out.empty() ? "" : "; ", what, a, asked_word, f, found_word);
  };
  add("target", quoted(asked.target), quoted(found.target));
  add("config hash", quoted(asked.config_hash), quoted(found.config_hash));
  add("tokenizer hash", quoted(asked.tokenizer_hash), quoted(found.tokenizer_hash));
  add("target quantisation", quoted(asked.target_quantisation), quoted(found.target_quantisation));
  add("taps", join(asked.taps), join(found.taps));
  add("last state", std::string(last_state_name(asked.last_state)), std::string(last_state_name(found.last_state)));
  add("hidden size", fmt::format("{}", asked.hidden_size), fmt::format("{}", found.hidden_size));
  add("vocabulary", fmt::format("{}", asked.vocab_size), fmt::format("{}", found.vocab_size));
  if (compare == IdentityCompare::full)
    add("codec", std::string(codec_name(asked.codec)), std::string(codec_name(found.codec)));
  std::map<std::string, std::string> keys = asked.extra;
  keys.insert(found.extra.begin(), found.extra.end());
  for (const auto& [key, unused] : keys) {
    const auto value = [&key = key](const StoreIdentity& id) {
      const auto it = id.extra.find(key);
      return it == id.extra.end() ? std::string("unknown") : "'" + it->second + "'";
    };
    add(key, value(asked), value(found));
  }
  return out;
}

std::string identity_text(const StoreIdentity& id) {
  Json j;
  j["codec"] = codec_name(id.codec);
  j["config_hash"] = id.config_hash;
  j["extra"] = Json::object();
  for (const auto& [key, value] : id.extra) j["extra"][key] = value;
  j["hidden_size"] = id.hidden_size;
  j["last_state"] = last_state_name(id.last_state);
  j["taps"] = id.taps;
  j["target"] = id.target;
  j["target_quantisation"] = id.target_quantisation;
  j["tokenizer_hash"] = id.tokenizer_hash;
  j["vocab_size"] = id.vocab_size;
  // A path that is not UTF-8 becomes replacement characters rather than an exception.
  std::string text = j.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

StoreIdentity parse_identity(std::string_view text, std::string_view where) {
  const Json j = parse_json(text, where);
  StoreIdentity id;
  try {
    const auto codec = j.at("codec").get<std::string>();
    DS_REQUIRE(codec == "raw" || codec == "zstd" || codec == "fp8", "{}: unknown codec '{}'", where, codec);
    id.codec = codec_from_name(codec);
    id.config_hash = j.at("config_hash").get<std::string>();
    for (const auto& [key, value] : j.at("extra").items()) id.extra[key] = value.get<std::string>();
    id.hidden_size = j.at("hidden_size").get<int64_t>();
    id.last_state = last_state_from_name(j.at("last_state").get<std::string>(), where);
    id.taps = j.at("taps").get<std::vector<int>>();
    id.target = j.at("target").get<std::string>();
    id.target_quantisation = j.at("target_quantisation").get<std::string>();
    id.tokenizer_hash = j.at("tokenizer_hash").get<std::string>();
    id.vocab_size = j.at("vocab_size").get<int64_t>();
  } catch (const Json::exception& e) {
    fail("{}: the identity of the store is not readable: {}", where, json_error(e));
  }
  check_identity(id, where);
  return id;
}

}  // namespace dspark::formats
