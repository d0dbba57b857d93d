// cuda/device.h for g++: the same names as cuda/device_cuda.h, on the emulation. Only device.h includes this.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numbers>
#include <type_traits>

#include "core/dtype.h"
#include "cuda_emulation/block.h"
#include "cuda_emulation/memory.h"
#include "cuda_emulation/streams.h"

#define DS_KERNEL
#define DS_DEVICE inline
#define DS_DEVICE_CALL inline
#define DS_UNROLL
#define DS_THREADS(n)
#define DS_THREADS_ALONE(n)

namespace dspark::cuda {

using Stream = void*;
using emulation::Block;
using emulation::Site;

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

inline int thread() { return Block::current().thread(); }
inline int threads() { return Block::current().launch().threads; }
inline int64_t block_x() { return Block::current().x(); }
inline int64_t block_y() { return Block::current().y(); }
inline int64_t blocks_x() { return Block::current().launch().grid_x; }
inline int64_t blocks_y() { return Block::current().launch().grid_y; }

inline float bits_as_float(uint32_t u) { return std::bit_cast<float>(u); }
inline uint32_t float_as_bits(float f) { return std::bit_cast<uint32_t>(f); }

inline void sin_cos_pi(float x, float& s, float& c) {
  s = static_cast<float>(std::sin(std::numbers::pi * x));
  c = static_cast<float>(std::cos(std::numbers::pi * x));
}

// ---- memory ----------------------------------------------------------------------------------------------------------------

template <typename T>
T load(const T* p) {
  static_assert(std::is_trivially_copyable_v<T>);
  emulation::check_global(p, sizeof(T), alignof(T), false);
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}
template <typename T>
void store(T* p, const T& v) {
  static_assert(std::is_trivially_copyable_v<T>);
  emulation::check_global(p, sizeof(T), alignof(T), true);
  std::memcpy(p, &v, sizeof(T));
}

template <typename T>
class Shared {
 public:
  Shared(int offset, int count) : offset_(offset), count_(count) {
    const Block& b = Block::current();
    if (offset < 0 || count < 0 || offset % static_cast<int>(alignof(T)) != 0 || offset + static_cast<int64_t>(count) * static_cast<int64_t>(sizeof(T)) > b.launch().shared_bytes)
      b.fault("a shared array of " + std::to_string(count) + " elements of " + std::to_string(sizeof(T)) + " bytes at byte " + std::to_string(offset) +
              " does not fit into the " + std::to_string(b.launch().shared_bytes) + " bytes of the launch, or is misaligned");
  }
  T operator[](int i) const { return get<T>(i); }
  void set(int i, T v) const { set_vector<T>(i, v); }
  template <typename V>
  V get(int i) const {
    V v;
    std::memcpy(&v, Block::current().read_shared(at(i, sizeof(V)), sizeof(V), alignof(V)), sizeof(V));
    return v;
  }
  template <typename V>
  void set_vector(int i, V v) const {
    std::memcpy(Block::current().write_shared(at(i, sizeof(V)), sizeof(V), alignof(V)), &v, sizeof(V));
  }
  // The byte of element i, which with the `bytes` from it on must lie in this array.
  int64_t at(int i, size_t bytes) const {
    if (i < 0 || i * static_cast<int64_t>(sizeof(T)) + static_cast<int64_t>(bytes) > count_ * static_cast<int64_t>(sizeof(T)))
      Block::current().fault("element " + std::to_string(i) + " of a shared array of " + std::to_string(count_));
    return offset_ + i * static_cast<int64_t>(sizeof(T));
  }

 private:
  int offset_, count_;
};

// ---- block and warp --------------------------------------------------------------------------------------------------------

inline void sync_block(Site site = Site::current()) { Block::current().sync_block(site); }
inline void sync_warp(Site site = Site::current()) { Block::current().sync_warp(site); }

namespace detail {
template <typename T>
struct Shuffled {
  T value;
  int source;
  T result;
};
template <typename T>
T shuffled(const char* what, T v, int source, uint32_t mask, Site site) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles 32- and 64-bit numbers");
  Shuffled<T> mine{v, source, {}};
  Block::current().collective(what, site, mask, &mine, [](Block& b, void* const* lanes, uint32_t m) {
    for (int l = 0; l < 32; ++l) {
      if (lanes[l] == nullptr) continue;
      auto& s = *static_cast<Shuffled<T>*>(lanes[l]);
      if ((m >> s.source & 1u) == 0) b.fault("a shuffle reads from lane " + std::to_string(s.source) + ", which is not in the mask");
      s.result = static_cast<const Shuffled<T>*>(lanes[s.source])->value;
    }
  });
  return mine.result;
}
}  // namespace detail

template <typename T>
T shuffle(T v, int source, uint32_t mask = 0xffffffffu, Site site = Site::current()) {
  return detail::shuffled("shuffle", v, source & 31, mask, site);
}
template <typename T>
T shuffle_xor(T v, int bits, uint32_t mask = 0xffffffffu, Site site = Site::current()) {
  const int own = thread() % 32, source = own ^ bits;
  return detail::shuffled("shuffle_xor", v, source < 32 ? source : own, mask, site);
}
template <typename T>
T shuffle_up(T v, int by, uint32_t mask = 0xffffffffu, Site site = Site::current()) {
  const int own = thread() % 32;
  return detail::shuffled("shuffle_up", v, own - by >= 0 ? own - by : own, mask, site);
}
template <typename T>
T shuffle_down(T v, int by, uint32_t mask = 0xffffffffu, Site site = Site::current()) {
  const int own = thread() % 32;
  return detail::shuffled("shuffle_down", v, own + by < 32 ? own + by : own, mask, site);
}
uint32_t vote_ballot(bool v, uint32_t mask = 0xffffffffu, Site site = Site::current());
inline bool vote_any(bool v, uint32_t mask = 0xffffffffu, Site site = Site::current()) { return vote_ballot(v, mask, site) != 0; }
inline bool vote_all(bool v, uint32_t mask = 0xffffffffu, Site site = Site::current()) { return vote_ballot(v, mask, site) == mask; }

// ---- asynchronous copies ---------------------------------------------------------------------------------------------------

template <typename T>
void cp_async16(Shared<T> to, int i, const T* p, bool valid = true) {
  Block::current().cp_async(to.at(i, 16), p, 16, valid);
}
inline void cp_async_commit() { Block::current().cp_async_commit(); }
template <int kPending>
void cp_async_wait() {
  Block::current().cp_async_wait(kPending);
}

// ---- tensor cores ----------------------------------------------------------------------------------------------------------

void ldmatrix4(uint32_t (&r)[4], Shared<bf16> from, int i, Site site = Site::current());
void ldmatrix4_transposed(uint32_t (&r)[4], Shared<bf16> from, int i, Site site = Site::current());
void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = Site::current());

// ---- launch ----------------------------------------------------------------------------------------------------------------

// Checks a launch as the driver would; a Fault says what is wrong.
void check_launch(Dim grid, Dim block, int shared_bytes, int64_t parameter_bytes);

template <typename... Params, typename... Args>
void launch(Stream stream, Dim grid, Dim block, int shared_bytes, void (*kernel)(Params...), const Args&... args) {
  check_launch(grid, block, shared_bytes, static_cast<int64_t>((sizeof(Params) + ... + 0)));
  emulation::Launch l{grid.x, grid.y, static_cast<int>(block.x), shared_bytes, [kernel, ... a = static_cast<Params>(args)] { kernel(a...); }};
  emulation::enqueue(static_cast<emulation::StreamState*>(stream), [l = std::move(l)] {
    emulation::pass_time(1e-3);
    emulation::run_grid(l);
  });
}

}  // namespace dspark::cuda
