// Votes, ldmatrix, mma and the launch checks of the emulation.
#include <fmt/format.h>

#include "cuda/device.h"

namespace dspark::cuda {

uint32_t vote_ballot(bool v, uint32_t mask, Site site) {
  struct Vote {
    bool value;
    uint32_t result;
  } mine{v, 0};
  Block::current().collective("vote", site, mask, &mine, [](Block&, void* const* lanes, uint32_t) {
    uint32_t votes = 0;
    for (int l = 0; l < 32; ++l)
      if (lanes[l] != nullptr && static_cast<Vote*>(lanes[l])->value) votes |= 1u << l;
    for (int l = 0; l < 32; ++l)
      if (lanes[l] != nullptr) static_cast<Vote*>(lanes[l])->result = votes;
  });
  return mine.result;
}

namespace {

struct MatrixRow {
  bf16 row[8];  // the row this lane names
  uint32_t r[4];
};

// Element (i, j) of matrix m is lane 8 m + i's element j.
void ldmatrix(uint32_t (&r)[4], Shared<bf16> from, int i, Site site, bool transposed) {
  MatrixRow mine{};
  const auto whole = from.get<Vector<bf16, 8>>(i);
  std::memcpy(mine.row, whole.v, sizeof mine.row);
  const auto normal = [](Block&, void* const* lanes, uint32_t) {
    for (int l = 0; l < 32; ++l)
      for (int m = 0; m < 4; ++m) {
        const bf16* row = static_cast<MatrixRow*>(lanes[8 * m + l / 4])->row;
        static_cast<MatrixRow*>(lanes[l])->r[m] = row[2 * (l % 4)].bits | static_cast<uint32_t>(row[2 * (l % 4) + 1].bits) << 16;
      }
  };
  const auto turned = [](Block&, void* const* lanes, uint32_t) {
    const auto element = [&](int m, int row, int col) { return static_cast<uint32_t>(static_cast<MatrixRow*>(lanes[8 * m + row])->row[col].bits); };
    for (int l = 0; l < 32; ++l)
      for (int m = 0; m < 4; ++m) static_cast<MatrixRow*>(lanes[l])->r[m] = element(m, 2 * (l % 4), l / 4) | element(m, 2 * (l % 4) + 1, l / 4) << 16;
  };
  if (transposed) Block::current().collective("ldmatrix4_transposed", site, kAllLanes, &mine, turned);
  else Block::current().collective("ldmatrix4", site, kAllLanes, &mine, normal);
  std::memcpy(r, mine.r, sizeof mine.r);
}

struct Fragments {
  const uint32_t *a, *b;
  float* c;
};

float half_of(uint32_t pair, int which) { return std::bit_cast<float>(which == 0 ? pair << 16 : pair & 0xffff0000u); }

// The fragment layouts of mma.m16n8k16 (PTX manual), with g = lane / 4 and t = lane % 4:
//   a: register i holds row g + 8 (i & 1), columns 2 t + 8 (i >> 1) and the next;
//   b: register i holds rows 2 t + 8 i and the next, column g;
//   c: element i is row g + 8 (i >> 1), column 2 t + (i & 1).
void multiply(Block&, void* const* lanes, uint32_t) {
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l) {
    const auto& f = *static_cast<Fragments*>(lanes[l]);
    const int g = l / 4, t = l % 4;
    for (int i = 0; i < 4; ++i)
      for (int e = 0; e < 2; ++e) a[g + 8 * (i & 1)][2 * t + 8 * (i >> 1) + e] = half_of(f.a[i], e);
    for (int i = 0; i < 2; ++i)
      for (int e = 0; e < 2; ++e) b[2 * t + 8 * i + e][g] = half_of(f.b[i], e);
  }
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + 8 * (i >> 1), col = 2 * (l % 4) + (i & 1);
      float sum = static_cast<Fragments*>(lanes[l])->c[i];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][col];
      static_cast<Fragments*>(lanes[l])->c[i] = sum;
    }
}

}  // namespace

void ldmatrix4(uint32_t (&r)[4], Shared<bf16> from, int i, Site site) { ldmatrix(r, from, i, site, false); }
void ldmatrix4_transposed(uint32_t (&r)[4], Shared<bf16> from, int i, Site site) { ldmatrix(r, from, i, site, true); }

void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  Fragments mine{a, b, c};
  Block::current().collective("mma_bf16", site, kAllLanes, &mine, multiply);
}

void check_launch(Dim grid, Dim block, int shared_bytes, int64_t parameter_bytes) {
  // The smallest of the limits of sm_80, sm_90, sm_100 and sm_103.
  constexpr int kMaxShared = 163 << 10;
  const auto require = [](bool ok, const std::string& message) {
    if (!ok) throw emulation::Fault("launch: " + message);
  };
  require(grid.x > 0 && grid.y > 0 && grid.z == 1, fmt::format("a grid of {} x {} x {} blocks", grid.x, grid.y, grid.z));
  require(grid.x <= 0x7fffffffu && grid.y <= 65535, fmt::format("a grid of {} x {} blocks; at most 2147483647 x 65535", grid.x, grid.y));
  require(block.x > 0 && block.x <= 1024 && block.x % 32 == 0 && block.y == 1 && block.z == 1,
          fmt::format("blocks of {} x {} x {} threads; whole warps in one dimension, at most 1024 threads", block.x, block.y, block.z));
  require(shared_bytes >= 0 && shared_bytes <= kMaxShared, fmt::format("{} bytes of shared memory; at most {}", shared_bytes, kMaxShared));
  require(parameter_bytes <= 4096, fmt::format("{} bytes of parameters; at most 4096", parameter_bytes));
}

}  // namespace dspark::cuda
