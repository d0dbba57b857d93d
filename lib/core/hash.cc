#include "core/hash.h"

#include <openssl/sha.h>

#include <array>
#include <cstring>

#include "core/error.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace dspark {
namespace {

#if !defined(__SSE4_2__)
constexpr auto kTable = [] {
  std::array<uint32_t, 256> t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c >> 1) ^ ((c & 1) ? 0x82F63B78u : 0);
    t[i] = c;
  }
  return t;
}();
#endif

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) {
  crc = ~crc;
  const auto* p = reinterpret_cast<const unsigned char*>(bytes.data());
  size_t n = bytes.size();
#if defined(__SSE4_2__)
  uint64_t c = crc;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    c = _mm_crc32_u64(c, v);
  }
  crc = static_cast<uint32_t>(c);
  for (; n > 0; --n) crc = _mm_crc32_u8(crc, *p++);
#else
  for (; n > 0; --n) crc = (crc >> 8) ^ kTable[(crc ^ *p++) & 255];
#endif
  return ~crc;
}

std::string sha256_hex(std::span<const std::byte> bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  std::string hex;
  for (unsigned char b : digest) hex += fmt::format("{:02x}", b);
  return hex;
}

std::string sha256_hex(std::string_view text) { return sha256_hex(std::as_bytes(std::span(text.data(), text.size()))); }

}  // namespace dspark
