#include <catch2/catch.hpp>

#include <nlohmann/json.hpp>

#include "core/dtype.h"
#include "core/error.h"
#include "core/finite.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
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

TEST_CASE("the first value that is not finite is found wherever it stands", "[core]") {
  const float inf = std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::max();
  for (const size_t n : {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{4097}, size_t{20000}}) {
    std::vector<float> v(n, -most);
    CHECK_FALSE(first_non_finite(v));
    for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()})
      for (const size_t at : {size_t{0}, n / 2, n - 1}) {
        if (n == 0) continue;
        std::vector<float> w = v;
        w[at] = w[n - 1] = bad;
        CHECK(first_non_finite(w) == at);
      }
  }
}

TEST_CASE("text from files cannot command a terminal", "[core]") {
  CHECK(printable("a\tb\nc") == "a\tb\nc");
  CHECK(printable("\x1b[31mred\r\a\x7f") == "\\x1b[31mred\\x0d\\x07\\x7f");
  CHECK(printable("gr\xc3\xbc\xc3\x9f, \xe6\x97\xa5, \xf0\x9f\x98\x80") == "gr\xc3\xbc\xc3\x9f, \xe6\x97\xa5, \xf0\x9f\x98\x80");
  CHECK(printable("\xc2\x9b" "31m") == "\\xc2\\x9b31m");                       // CSI as one character
  CHECK(printable("\xff\xc3|\xc0\xaf|\xed\xa0\x80") == "\\xff\\xc3|\\xc0\\xaf|\\xed\\xa0\\x80");  // none, cut, overlong, surrogate
  CHECK(printable(std::string(100, 'x'), 80) == std::string(80, 'x') + "...");
  CHECK(printable(std::string(80, 'x'), 80) == std::string(80, 'x'));
}

TEST_CASE("what is not JSON is said with its place, in our words", "[core]") {
  const auto message = [](std::string_view text) {
    try {
      parse_json(text, "file");
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("none");
  };
  CHECK(message("{\"a\": }") == "file: not valid JSON at byte 6, near '}'");
  CHECK(message("{\n  \"a\": 1,\n  b\n}") == "file: not valid JSON at line 3, column 3, near 'b'");
  CHECK(message("{\"a\": [1, 2") == "file: not valid JSON at byte 11, where it ends too early");
  CHECK(message("") == "file: not valid JSON: it is empty");
  try {
    Json(3).get<std::string>();
    FAIL("a number is no text");
  } catch (const Json::exception& e) {
    CHECK(json_error(e).starts_with("type must be string"));
  }
  CHECK(json_error(std::runtime_error("[x] y")) == "[x] y");
  CHECK(message("[1e999]") == "file: not valid JSON: a number in it is too large");
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
