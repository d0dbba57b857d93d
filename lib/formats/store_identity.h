// What hidden states came from. Two stores hold the same kind of thing iff their identities are equal; every shard
// carries its identity as canonical JSON text, and every record the CRC32C of that text.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace dspark::formats {

enum class LastState : uint8_t { pre_norm, post_norm };          // before or after the target's final norm
enum class StoreCodec : uint8_t { raw = 0, zstd = 1, fp8 = 2 };  // fp8 is lossy

std::string_view last_state_name(LastState v);
std::string_view codec_name(StoreCodec v);
StoreCodec codec_from_name(std::string_view name);  // an Error (wrong usage) lists the names

inline constexpr int kUnknownTap = -1;  // in `taps` of a foreign source that does not say them

struct StoreIdentity {
  std::string target;               // name or path as given
  std::string config_hash;          // SHA-256 of what decides the target's numbers; "" when unknown
  std::string tokenizer_hash;       // "" when unknown
  std::string target_quantisation;  // what the weights were: "BF16", "Q4_1 ..."
  std::vector<int> taps;            // residual stream after n decoder layers, ascending
  LastState last_state = LastState::pre_norm;
  int64_t hidden_size = 0;  // E
  int64_t vocab_size = 0;   // V; 0 when unknown
  StoreCodec codec = StoreCodec::raw;
  std::map<std::string, std::string>
      extra;  // anything else that must be equal to resume (precision, template hash, ...)

  int n_parts() const { return static_cast<int>(taps.size()) + 1; }  // L+1
  int64_t row_width() const { return n_parts() * hidden_size; }      // (L+1)*E
  bool operator==(const StoreIdentity&) const = default;
};

// Throws when a field makes no sense; `where` names the object in the message.
void check_identity(const StoreIdentity& identity, std::string_view where);

// "" when equal, else every field that differs: "taps: 2 10 18 asked, 2 9 15 in the store; ...", with other words for the two where
// nobody asked. `data_only` leaves out the codec (what a trainer reading several stores needs).
enum class IdentityCompare { full, data_only };
std::string identity_difference(const StoreIdentity& asked, const StoreIdentity& found,
                                IdentityCompare compare = IdentityCompare::full, std::string_view asked_word = "asked",
                                std::string_view found_word = "in the store");

// Canonical JSON text (keys sorted), padded with spaces to a multiple of 8 bytes.
std::string identity_text(const StoreIdentity& identity);
// Unknown keys are ignored (a newer minor version may have them); missing or wrong ones are an Error naming `where`.
StoreIdentity parse_identity(std::string_view text, std::string_view where);

}  // namespace dspark::formats
