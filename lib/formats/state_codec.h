// How one block of states (rows of one part, [n_rows, E] bf16) becomes bytes and back. The layouts are normative:
//
//   raw      bf16[n_rows * E]
//   planes   u32 low_bytes, low plane, high plane. The low plane holds bits 0..7 of every element, the high plane
//   bits 8..15
//            (sign and upper exponent bits). A plane of exactly n_rows * E bytes is stored as it is, a shorter one is a
//            zstd frame of that content. Lossless. Nearly all that can be gained is in the high plane, and there by
//            entropy coding alone, so it is compressed Huffman-only; the low plane of real states is noise and normally
//            stored.
//   fp8      f32 scale[n_rows], then e4m3[n_rows * E] (the "fn" variant: 4 exponent bits, bias 7, no infinities,
//   largest
//            448): value = e4m3 * scale, or bf16's largest where that is beyond it. The scale is the smallest power of
//            two that keeps the row within +-448, at least 2^-124: so division and product are exact, every decoded
//            value is a bf16, and the only error is e4m3's rounding: |error| <= max(|x| / 16, scale / 1024). Lossy.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "formats/store_identity.h"

struct ZSTD_CCtx_s;
struct ZSTD_DCtx_s;

namespace dspark::formats {

enum class BlockCoding : uint32_t { raw = 0, planes = 1, fp8 = 2 };

// Owns the compressor's memory; one a thread.
class BlockEncoder {
 public:
  explicit BlockEncoder(StoreCodec codec);
  ~BlockEncoder();
  BlockEncoder(const BlockEncoder&) = delete;
  BlockEncoder& operator=(const BlockEncoder&) = delete;
  // Appends the coded block to `out`; returns how it was coded (with zstd, raw when compression does not pay).
  // fp8 needs finite values: anything else throws.
  BlockCoding encode(const bf16* states, int64_t n_rows, int64_t width, int64_t row_stride,
                     std::vector<std::byte>& out);

 private:
  StoreCodec codec_;
  ZSTD_CCtx_s* zstd_ = nullptr;
  std::vector<uint8_t> planes_;
};

class BlockDecoder {
 public:
  BlockDecoder() = default;
  ~BlockDecoder();
  BlockDecoder(const BlockDecoder&) = delete;
  BlockDecoder& operator=(const BlockDecoder&) = delete;
  // Decodes rows [begin, end) of a block of n_rows rows into dst (row_stride in elements). Returns "" or what is wrong
  // with the bytes; never reads outside them.
  std::string decode(std::span<const std::byte> block, BlockCoding coding, int64_t n_rows, int64_t width, int64_t begin,
                     int64_t end, bf16* dst, int64_t row_stride);

 private:
  ZSTD_DCtx_s* zstd_ = nullptr;
  std::vector<uint8_t> planes_;
};

// One e4m3 value: nearest, ties to even, saturating at +-448. Finite input.
uint8_t to_e4m3(float v);
float from_e4m3(uint8_t v);  // 0x7f and 0xff are NaN

}  // namespace dspark::formats
