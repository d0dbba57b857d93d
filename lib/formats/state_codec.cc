#define ZSTD_STATIC_LINKING_ONLY  // ZSTD_c_literalCompressionMode
#include "formats/state_codec.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "formats/sample_source.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace dspark::formats {
namespace {

constexpr float kLargest = 0x1.fep127f;  // of bf16

void zstd_set(ZSTD_CCtx* c, ZSTD_cParameter parameter, int value) {
  const size_t rc = ZSTD_CCtx_setParameter(c, parameter, value);
  DS_REQUIRE(!ZSTD_isError(rc), "zstd refuses parameter {} = {}: {}", static_cast<int>(parameter), value,
             ZSTD_getErrorName(rc));
}

void split_planes(const bf16* src, int64_t n, uint8_t* low, uint8_t* high) {
  int64_t i = 0;
#if defined(__SSE2__)
  const __m128i mask = _mm_set1_epi16(0xff);
  for (; i + 16 <= n; i += 16) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i + 8));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i),
                     _mm_packus_epi16(_mm_and_si128(a, mask), _mm_and_si128(b, mask)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i),
                     _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
  }
#endif
  for (; i < n; ++i) {
    low[i] = static_cast<uint8_t>(src[i].bits);
    high[i] = static_cast<uint8_t>(src[i].bits >> 8);
  }
}

void join_planes(const uint8_t* low, const uint8_t* high, int64_t n, bf16* dst) {
  int64_t i = 0;
#if defined(__SSE2__)
  for (; i + 16 <= n; i += 16) {
    const __m128i l = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low + i));
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm_unpacklo_epi8(l, h));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i + 8), _mm_unpackhi_epi8(l, h));
  }
#endif
  for (; i < n; ++i) dst[i].bits = static_cast<uint16_t>(low[i] | (high[i] << 8));
}

// Whether entropy coding a plane can gain more than about 2 %, judged from 512-byte pieces spread over it. Compressing
// a noise plane only to throw the result away would cost as much as the plane that pays.
bool pays(const uint8_t* plane, size_t n) {
  constexpr size_t kPiece = 512, kPieces = 16;
  std::array<uint32_t, 256> count{};
  size_t total = 0;
  if (n <= kPiece * kPieces) {
    for (size_t i = 0; i < n; ++i) ++count[plane[i]];
    total = n;
  } else {
    for (size_t p = 0; p < kPieces; ++p) {
      const uint8_t* piece = plane + (n - kPiece) / (kPieces - 1) * p;
      for (size_t i = 0; i < kPiece; ++i) ++count[piece[i]];
    }
    total = kPiece * kPieces;
  }
  double bits = 0;
  for (uint32_t c : count)
    if (c) bits -= c * std::log2(static_cast<double>(c) / static_cast<double>(total));
  return bits < 0.98 * 8.0 * static_cast<double>(total);
}

std::array<float, 256> e4m3_table() {
  std::array<float, 256> t{};
  for (int i = 0; i < 256; ++i) t[static_cast<size_t>(i)] = from_e4m3(static_cast<uint8_t>(i));
  return t;
}

template <typename T>
void append(std::vector<std::byte>& out, const T* data, size_t n) {
  const auto* p = reinterpret_cast<const std::byte*>(data);
  out.insert(out.end(), p, p + n * sizeof(T));
}

void encode_fp8(const bf16* states, int64_t n_rows, int64_t width, int64_t row_stride, std::vector<std::byte>& out) {
  const size_t at = out.size();
  out.resize(at + static_cast<size_t>(n_rows * (4 + width)));
  auto* scales = out.data() + at;
  auto* values = reinterpret_cast<uint8_t*>(scales + n_rows * 4);
  for (int64_t r = 0; r < n_rows; ++r) {
    const bf16* row = states + r * row_stride;
    float largest = 0;
    for (int64_t c = 0; c < width; ++c) largest = std::max(largest, std::fabs(to_float(row[c])));
    // 448 = 0.875 * 2^9 and largest = f * 2^e with f in [0.5, 1).
    int e = 0;
    const float f = std::frexp(largest, &e);
    const int k = largest == 0 ? -124 : std::max(-124, f <= 0.875f ? e - 9 : e - 8);
    const float scale = std::ldexp(1.0f, k), inverse = std::ldexp(1.0f, -k);
    for (int64_t c = 0; c < width; ++c) values[r * width + c] = to_e4m3(to_float(row[c]) * inverse);
    std::memcpy(scales + r * 4, &scale, 4);
  }
}

}  // namespace

uint8_t to_e4m3(float v) {
  const uint8_t sign = std::signbit(v) ? 0x80 : 0;
  const float a = std::min(std::fabs(v), 448.0f);
  if (a < 0x1p-6f)  // subnormal: steps of 2^-9; a result of 8 is the smallest normal number, whose code is 8 as well
    return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyint(a * 0x1p9f)));
  uint32_t u = std::bit_cast<uint32_t>(a);
  u += 0x7ffffu + ((u >> 20) & 1u);  // keep 3 mantissa bits, ties to even
  const uint32_t code = (u >> 20) - ((127 - 7) << 3);
  return static_cast<uint8_t>(sign | std::min(code, 0x7eu));
}

float from_e4m3(uint8_t v) {
  const int e = (v >> 3) & 15, m = v & 7;
  if ((v & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fc00000u);
  const float a = e == 0 ? std::ldexp(static_cast<float>(m), -9) : std::ldexp(static_cast<float>(8 + m), e - 10);
  return v & 0x80 ? -a : a;
}

BlockEncoder::BlockEncoder(StoreCodec codec) : codec_(codec) {
  if (codec_ != StoreCodec::zstd) return;
  zstd_ = ZSTD_createCCtx();
  DS_REQUIRE(zstd_, "no memory for the zstd compressor");
  // Huffman only: states have no repeats worth searching. Acceleration (targetLength) makes the match search skip at
  // once.
  zstd_set(zstd_, ZSTD_c_compressionLevel, 1);
  zstd_set(zstd_, ZSTD_c_literalCompressionMode, ZSTD_ps_enable);
  zstd_set(zstd_, ZSTD_c_strategy, ZSTD_fast);
  zstd_set(zstd_, ZSTD_c_minMatch, 7);
  zstd_set(zstd_, ZSTD_c_targetLength, 128 << 10);
}

BlockEncoder::~BlockEncoder() { ZSTD_freeCCtx(zstd_); }

BlockCoding BlockEncoder::encode(const bf16* states, int64_t n_rows, int64_t width, int64_t row_stride,
                                 std::vector<std::byte>& out) {
  const size_t n = static_cast<size_t>(n_rows * width);
  if (codec_ == StoreCodec::fp8) {
    if (const auto bad = first_non_finite(states, n_rows, width, row_stride))
      fail("the fp8 codec cannot hold {} (row {}, column {} of a block)", bad->value, bad->row, bad->column);
    encode_fp8(states, n_rows, width, row_stride, out);
    return BlockCoding::fp8;
  }
  if (codec_ == StoreCodec::zstd) {
    planes_.resize(2 * n);
    uint8_t* low = planes_.data();
    uint8_t* high = low + n;
    for (int64_t r = 0; r < n_rows; ++r)
      split_planes(states + r * row_stride, width, low + r * width, high + r * width);
    const size_t at = out.size();
    const uint32_t unknown = 0;
    append(out, &unknown, 1);
    const auto add_plane = [&](const uint8_t* plane) -> size_t {
      if (pays(plane, n)) {
        const size_t start = out.size();
        out.resize(start + ZSTD_compressBound(n));
        const size_t got = ZSTD_compress2(zstd_, out.data() + start, out.size() - start, plane, n);
        DS_ASSERT(!ZSTD_isError(got), "zstd: {}", ZSTD_getErrorName(got));
        out.resize(start + got);
        if (got < n) return got;
        out.resize(start);
      }
      append(out, plane, n);
      return n;
    };
    const uint32_t low_bytes = static_cast<uint32_t>(add_plane(low));
    add_plane(high);
    std::memcpy(out.data() + at, &low_bytes, 4);
    if (out.size() - at < 2 * n) return BlockCoding::planes;
    out.resize(at);
  }
  for (int64_t r = 0; r < n_rows; ++r) append(out, states + r * row_stride, static_cast<size_t>(width));
  return BlockCoding::raw;
}

BlockDecoder::~BlockDecoder() { ZSTD_freeDCtx(zstd_); }

std::string BlockDecoder::decode(std::span<const std::byte> block, BlockCoding coding, int64_t n_rows, int64_t width,
                                 int64_t begin, int64_t end, bf16* dst, int64_t row_stride) {
  const size_t n = static_cast<size_t>(n_rows * width);
  const auto* bytes = reinterpret_cast<const uint8_t*>(block.data());
  if (coding == BlockCoding::raw) {
    if (block.size() != 2 * n) return fmt::format("a raw block of {} bytes, expected {}", block.size(), 2 * n);
    for (int64_t r = begin; r < end; ++r)
      std::memcpy(dst + (r - begin) * row_stride, bytes + r * width * 2, static_cast<size_t>(width) * 2);
    return "";
  }
  if (coding == BlockCoding::fp8) {
    const size_t expected = static_cast<size_t>(n_rows) * 4 + n;
    if (block.size() != expected) return fmt::format("an fp8 block of {} bytes, expected {}", block.size(), expected);
    static const std::array<float, 256> table = e4m3_table();
    for (int64_t r = begin; r < end; ++r) {
      float scale;
      std::memcpy(&scale, bytes + r * 4, 4);
      const uint8_t* row = bytes + n_rows * 4 + r * width;
      for (int64_t c = 0; c < width; ++c)
        dst[(r - begin) * row_stride + c] = to_bf16(std::clamp(table[row[c]] * scale, -kLargest, kLargest));
    }
    return "";
  }
  if (coding != BlockCoding::planes) return fmt::format("unknown block coding {}", static_cast<uint32_t>(coding));
  uint32_t low_bytes = 0;
  if (block.size() < 4) return "a block without its plane size";
  std::memcpy(&low_bytes, bytes, 4);
  if (low_bytes > n || low_bytes > block.size() - 4 || block.size() - 4 - low_bytes > n)
    return fmt::format("planes of {} and more bytes in a block of {}", low_bytes, block.size());
  planes_.resize(2 * n);
  const auto plane = [&](const uint8_t* src, size_t stored, uint8_t* scratch) -> const uint8_t* {
    if (stored == n) return src;
    if (!zstd_) zstd_ = ZSTD_createDCtx();
    const size_t got = ZSTD_decompressDCtx(zstd_, scratch, n, src, stored);
    return !ZSTD_isError(got) && got == n ? scratch : nullptr;
  };
  const uint8_t* low = plane(bytes + 4, low_bytes, planes_.data());
  const uint8_t* high = plane(bytes + 4 + low_bytes, block.size() - 4 - low_bytes, planes_.data() + n);
  if (!low || !high) return fmt::format("the {} plane does not decompress", low ? "high" : "low");
  for (int64_t r = begin; r < end; ++r)
    join_planes(low + r * width, high + r * width, width, dst + (r - begin) * row_stride);
  return "";
}

}  // namespace dspark::formats
