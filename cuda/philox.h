// lib/core/rng's numbers on the device: Philox4x32-10 at a counter. cuRAND's are the same: curand_init with this seed, `mixed` ^ stream << 32
// as the subsequence and 4 index as the offset, then curand4.
#pragma once

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace dspark::cuda {

// Rng::bits.
DS_DEVICE uint64_t random_bits(const NoiseSeed& s, uint64_t index) {
  const uint64_t mixed = s.substream * 0x9E3779B97F4A7C15u;
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32), c2 = static_cast<uint32_t>(mixed), c3 = static_cast<uint32_t>(mixed >> 32) ^ s.stream;
  uint32_t k0 = static_cast<uint32_t>(s.seed), k1 = static_cast<uint32_t>(s.seed >> 32);
  DS_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1, c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return uint64_t{c1} << 32 | c0;
}
// Rng::uniform: [0, 1), 53 bits.
DS_DEVICE double random_uniform(const NoiseSeed& s, uint64_t index) { return static_cast<double>(random_bits(s, index) >> 11) * 0x1.0p-53; }

}  // namespace dspark::cuda
