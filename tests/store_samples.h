// Small stores of made-up samples for the tests of stores.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>
#include <string_view>

#include "core/rng.h"
#include "formats/store.h"

namespace store_samples {

using namespace dspark;
using namespace dspark::formats;

// A folder that is gone at the end of the test.
struct TempFolder {
  fs::path path;
  TempFolder() {
    // In memory where that is possible: these tests sync thousands of times.
    std::string name = "/dev/shm/dspark_store_XXXXXX";
    if (!::mkdtemp(name.data())) {
      name = (fs::temp_directory_path() / "dspark_store_XXXXXX").string();
      REQUIRE(::mkdtemp(name.data()));
    }
    path = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

inline StoreIdentity small_identity(StoreCodec codec) {
  StoreIdentity id;
  id.target = "tiny";
  id.config_hash = "c0ffee";
  id.tokenizer_hash = "70ce";
  id.target_quantisation = "F32";
  id.taps = {2, 5};
  id.hidden_size = 5;
  id.vocab_size = 64;
  id.codec = codec;
  return id;
}

struct Sample {
  uint64_t id = 0;
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;
  std::vector<bf16> states;  // [T, width]
  int64_t width = 0;
  uint64_t conversation = 0;
  SampleView view() const { return {id, ids, mask, FinishReason::stop, states.data(), width, conversation}; }
};

inline Sample make_sample(uint64_t id, int64_t n_tokens, int64_t width) {
  const Rng rng(7, RngStream::test, id);
  Sample s;
  s.id = id;
  s.width = width;
  s.conversation = ~id;
  for (int64_t t = 0; t < n_tokens; ++t) {
    s.ids.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(t), 64)));
    s.mask.push_back(t % 3 != 0);
  }
  for (int64_t i = 0; i < n_tokens * width; ++i)
    s.states.push_back(to_bf16(static_cast<float>(rng.normal(1000 + static_cast<uint64_t>(i)) * 3)));
  return s;
}

inline bool same_bits(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 2) == 0);
}

inline std::vector<bf16> read_all(const SampleSource& source, int64_t i) {
  std::vector<bf16> out(static_cast<size_t>(source.info(i).n_tokens * source.row_width()));
  source.read_states(i, out.data(), source.row_width());
  return out;
}

inline bool equal(const SampleSource& source, int64_t i, const Sample& s) {
  const SampleTokens t = source.tokens(i);
  return source.info(i).id == s.id && source.info(i).conversation == s.conversation && t.token_ids == s.ids &&
         t.loss_mask == s.mask && source.info(i).n_mask == std::count(s.mask.begin(), s.mask.end(), 1) &&
         same_bits(read_all(source, i), s.states);
}

inline std::string file_bytes(const fs::path& path) { return read_text(path); }
inline void write_bytes(const fs::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// A store of three small samples; returns them.
inline std::vector<Sample> write_small(const fs::path& folder, StoreCodec codec, bool finish = true) {
  const StoreIdentity id = small_identity(codec);
  std::vector<Sample> samples;
  StoreWriter w(folder, id);
  for (uint64_t k = 0; k < 3; ++k) {
    samples.push_back(make_sample(0xabc0 + k, 1 + static_cast<int64_t>(k) * 2, id.row_width()));
    REQUIRE(w.append(encode_record(w.format(), samples.back().view())));
  }
  if (finish) w.finish();
  return samples;
}

}  // namespace store_samples
