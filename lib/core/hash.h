// Checksums: CRC32C (Castagnoli) for stored blocks, SHA-256 for identities.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace dspark {

// CRC32C of the bytes, continuing from `crc` (0 at the start). crc32c("123456789") == 0xE3069283.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

// Lower-case hex SHA-256.
std::string sha256_hex(std::span<const std::byte> bytes);
std::string sha256_hex(std::string_view text);

}  // namespace dspark
