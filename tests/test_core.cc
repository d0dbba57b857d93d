#include <catch2/catch.hpp>

#include "core/dtype.h"
#include "core/hash.h"
#include "core/rng.h"
#include "core/threads.h"

#include <limits>
#include <numeric>
#include <vector>

using namespace dspark;

TEST_CASE("crc32c and sha256 give the published check values", "[core]") {
  const std::string_view digits = "123456789";
  CHECK(crc32c(std::as_bytes(std::span(digits.data(), digits.size()))) == 0xE3069283u);
  CHECK(sha256_hex("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST_CASE("philox gives the known answers of Random123", "[core]") {
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}) ==
        std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
}

TEST_CASE("bf16 rounds to nearest even and keeps NaN", "[core]") {
  CHECK(to_bf16(1.0f).bits == 0x3f80);
  CHECK(to_bf16(1.00390625f).bits == 0x3f80);   // a tie, to even
  CHECK(to_bf16(1.01171875f).bits == 0x3f82);   // a tie, to even
  CHECK(to_float(to_bf16(std::numeric_limits<float>::quiet_NaN())) != to_float(to_bf16(std::numeric_limits<float>::quiet_NaN())));
  CHECK(f16_to_float(0x3c00) == 1.0f);
  CHECK(f16_to_float(0x0001) == 0x1.0p-24f);
}

TEST_CASE("parallel_for covers every index once and carries exceptions", "[core]") {
  ThreadPool pool(3);
  std::vector<int> hits(1001);
  pool.parallel_for(1001, 7, [&](int64_t b, int64_t e, int) {
    for (int64_t i = b; i < e; ++i) ++hits[static_cast<size_t>(i)];
  });
  CHECK(std::accumulate(hits.begin(), hits.end(), 0) == 1001);
  CHECK(*std::max_element(hits.begin(), hits.end()) == 1);
  CHECK_THROWS(pool.parallel_for(10, 1, [](int64_t, int64_t, int) { throw std::runtime_error("x"); }));
}
