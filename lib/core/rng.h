// Counter-based random numbers (Philox4x32-10, Salmon et al., SC'11): the value at a counter is a pure function of
// (seed, stream, index), so any thread, rank or device can draw any number in any order and get the same bits.
#pragma once

#include <array>
#include <cstdint>

namespace dspark {

// What a stream of numbers is for. Streams never share values under one seed.
enum class RngStream : uint32_t { init = 1, shuffle, anchors, sampling, verify, synth, split, noise, test };

// Ten rounds of Philox4x32 on `counter` under `key`.
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

class Rng {
 public:
  // `substream` separates independent users of one stream (a tensor, a document, an epoch).
  Rng(uint64_t seed, RngStream stream, uint64_t substream = 0) : seed_(seed), stream_(stream), substream_(substream) {}

  uint64_t bits(uint64_t index) const;    // 64 random bits
  double uniform(uint64_t index) const;   // [0, 1), 53 bits
  double normal(uint64_t index) const;    // N(0, 1), Box-Muller
  uint64_t below(uint64_t index, uint64_t n) const;  // [0, n), unbiased to 2^-64

 private:
  std::array<uint32_t, 4> block(uint64_t index) const;
  uint64_t seed_;
  RngStream stream_;
  uint64_t substream_;
};

}  // namespace dspark
