// The emulation of the CUDA execution model: what it must compute, by tables written from the PTX manual, and each kind of fault
// it must find, by a kernel that is wrong on purpose.
#include <catch2/catch.hpp>

#include <cstring>
#include <functional>
#include <vector>

#include "core/rng.h"
#include "cuda/device.h"
#include "cuda/tile.h"

using namespace dspark;
using namespace dspark::cuda;
using Catch::Contains;

namespace {

// A device array for one test.
template <typename T>
class Global {
 public:
  explicit Global(int64_t n) : p_(static_cast<T*>(emulation::allocate_global(n * static_cast<int64_t>(sizeof(T))))), n_(n) {}
  Global(const std::vector<T>& v) : Global(static_cast<int64_t>(v.size())) { std::memcpy(p_, v.data(), v.size() * sizeof(T)); }
  ~Global() { emulation::free_global(p_); }
  Global(const Global&) = delete;
  Global& operator=(const Global&) = delete;
  T* get() const { return p_; }
  std::vector<T> host() const { return {p_, p_ + n_}; }

 private:
  T* p_;
  int64_t n_;
};

// Runs a kernel to its end; seeds of the order are the caller's.
template <typename... Params, typename... Args>
void run(Dim grid, Dim block, int shared_bytes, void (*kernel)(Params...), const Args&... args) {
  emulation::StreamState* s = emulation::create_stream();
  launch(s, grid, block, shared_bytes, kernel, args...);
  emulation::synchronize(s);
  emulation::destroy_stream(s);
}

// A kernel without arguments.
void run(int threads, int shared_bytes, void (*kernel)()) { run({1}, {static_cast<unsigned>(threads)}, shared_bytes, kernel); }

// Every kernel here is run in several orders: a fault must be found in each.
template <typename Run>
void always(const Run& r) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    emulation::set_seed(seed);
    r();
  }
}

DS_KERNEL void reverse_through_shared(float* p) {
  const Shared<float> s(0, threads());
  s.set(thread(), load(p + block_x() * threads() + thread()));
  sync_block();
  store(p + block_x() * threads() + thread(), s[threads() - 1 - thread()]);
}

DS_KERNEL void sums(const float* p, float* out) {
  const Shared<float> scratch(0, warps());
  const float v = load(p + thread());
  const float whole = block_sum(v, scratch), of_warp = warp_sum(v);
  store(out + thread(), whole);
  store(out + threads() + thread(), of_warp);
}

DS_KERNEL void lane_games(int* out) {
  const int l = lane();
  store(out + l, shuffle(l * 10, (l + 1) % 32));
  store(out + 32 + l, shuffle_xor(l, 5));
  store(out + 64 + l, shuffle_up(l, 3));
  store(out + 96 + l, shuffle_down(l, 3));
  const uint32_t low = 0x0000ffffu;
  if (l < 16) store(out + 128 + l, static_cast<int>(vote_ballot(l % 3 == 0, low)));
  store(out + 160 + l, (vote_any(l == 7) ? 1 : 0) + (vote_all(l < 32) ? 2 : 0) + (vote_any(l > 40) ? 4 : 0) + (vote_all(l == 0) ? 8 : 0));
}

}  // namespace

TEST_CASE("blocks, barriers, shuffles and votes of the emulation", "[cuda]") {
  always([] {
    std::vector<float> v(3 * 96);
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);
    const Global<float> p(v);
    run({3}, {96}, 96 * 4, reverse_through_shared, p.get());
    const std::vector<float> got = p.host();
    for (size_t i = 0; i < v.size(); ++i) CHECK(got[i] == static_cast<float>(i / 96 * 96 + 95 - i % 96));

    const Global<float> q(v), out(2 * 96);
    run({1}, {96}, 3 * 4, sums, q.get(), out.get());
    for (int i = 0; i < 96; ++i) {
      CHECK(out.host()[static_cast<size_t>(i)] == 95 * 96 / 2);
      CHECK(out.host()[static_cast<size_t>(96 + i)] == static_cast<float>(32 * (i / 32 * 32) + 31 * 32 / 2));
    }

    const Global<int> games(192);
    run({1}, {32}, 0, lane_games, games.get());
    const std::vector<int> g = games.host();
    for (int l = 0; l < 32; ++l) {
      const auto at = [&](int row) { return g[static_cast<size_t>(row * 32 + l)]; };
      CHECK(at(0) == (l + 1) % 32 * 10);
      CHECK(at(1) == (l ^ 5));
      CHECK(at(2) == (l < 3 ? l : l - 3));
      CHECK(at(3) == (l > 28 ? l : l + 3));
      if (l < 16) CHECK(at(4) == 0x9249);  // bits 0, 3, 6, 9, 12, 15
      else CHECK(at(4) == -1);             // poison: not written
      CHECK(at(5) == 3);
    }
  });
}

// ---- tensor cores ----------------------------------------------------------------------------------------------------------

namespace {

// PTX manual, "Matrix fragments for mma.m16n8k16", for .bf16: element index i within a lane -> (row, column).
struct Place {
  int row, col;
};
Place place_a(int l, int i) { return {(i < 2 || (i >= 4 && i < 6)) ? l >> 2 : (l >> 2) + 8, (l % 4) * 2 + (i & 1) + (i < 4 ? 0 : 8)}; }
Place place_b(int l, int i) { return {(l % 4) * 2 + (i & 1) + (i < 2 ? 0 : 8), l >> 2}; }
Place place_c(int l, int i) { return {i < 2 ? l >> 2 : (l >> 2) + 8, (l % 4) * 2 + (i & 1)}; }

std::vector<bf16> random_bf16(int n, uint64_t seed) {
  const Rng rng(seed, RngStream::test);
  std::vector<bf16> v;
  for (int i = 0; i < n; ++i) v.push_back(to_bf16(static_cast<float>(rng.normal(static_cast<uint64_t>(i)))));
  return v;
}

DS_KERNEL void one_mma(const uint32_t* a, const uint32_t* b, float* c) {
  uint32_t ra[4], rb[2];
  float rc[4];
  for (int i = 0; i < 4; ++i) ra[i] = load(a + 4 * lane() + i), rc[i] = load(c + 4 * lane() + i);
  for (int i = 0; i < 2; ++i) rb[i] = load(b + 2 * lane() + i);
  mma_bf16(rc, ra, rb);
  for (int i = 0; i < 4; ++i) store(c + 4 * lane() + i, rc[i]);
}

DS_KERNEL void load_matrices(const bf16* p, uint32_t* out, bool transposed) {
  const Shared<bf16> s(0, 4 * 64);
  for (int i = 0; i < 8; ++i) s.set(8 * lane() + i, load(p + 8 * lane() + i));
  sync_warp();
  uint32_t r[4];
  if (transposed) ldmatrix4_transposed(r, s, 8 * lane());
  else ldmatrix4(r, s, 8 * lane());
  for (int i = 0; i < 4; ++i) store(out + 4 * lane() + i, r[i]);
}

// c [16, 16] = a [16, 32] b with b [16 columns, 32] or, transposed, [32, 16 columns]; through shared memory with a row pitch of 40.
template <typename T>
DS_KERNEL void tile_product(const T* a, const T* b, float* c, bool transposed) {
  constexpr int kPitch = 40;
  const Shared<T> sa(0, 16 * kPitch), sb(16 * kPitch * static_cast<int>(sizeof(T)), 32 * kPitch);
  for (int i = lane(); i < 16 * 32; i += 32) {
    sa.set(i / 32 * kPitch + i % 32, load(a + i));
    if (transposed) sb.set(i / 16 * kPitch + i % 16, load(b + i));
    else sb.set(i / 32 * kPitch + i % 32, load(b + i));
  }
  sync_warp();
  float acc[2][4] = {};
  for (int k = 0; k < 32; k += 16) {
    typename Mma<T>::A fa;
    typename Mma<T>::B fb[2];
    Mma<T>::load_a(fa, sa, 0, k, kPitch);
    if (transposed) Mma<T>::load_b_transposed(fb, sb, k, 0, kPitch);
    else Mma<T>::load_b(fb, sb, 0, k, kPitch);
    for (int j = 0; j < 2; ++j) Mma<T>::mma(acc[j], fa, fb[j]);
  }
  for (int j = 0; j < 2; ++j)
    for (int i = 0; i < 4; ++i) store(c + (lane() / 4 + 8 * (i / 2)) * 16 + 8 * j + 2 * (lane() % 4) + i % 2, acc[j][i]);
}

// The product's result as an operand: c = (a I) I, which gives a's first 16 columns back.
template <typename T>
DS_KERNEL void tile_chain(const T* a, float* c) {
  const Shared<T> sa(0, 16 * 24), one(16 * 24 * static_cast<int>(sizeof(T)), 16 * 24);
  for (int i = lane(); i < 256; i += 32) {
    sa.set(i / 16 * 24 + i % 16, load(a + i));
    one.set(i / 16 * 24 + i % 16, from_float<T>(i / 16 == i % 16 ? 1.0f : 0.0f));
  }
  sync_warp();
  typename Mma<T>::A fa;
  typename Mma<T>::B eye[2];
  Mma<T>::load_a(fa, sa, 0, 0, 24);
  Mma<T>::load_b(eye, one, 0, 0, 24);
  float first[2][4] = {}, second[2][4] = {};
  for (int j = 0; j < 2; ++j) Mma<T>::mma(first[j], fa, eye[j]);
  Mma<T>::from_c(fa, first[0], first[1]);
  for (int j = 0; j < 2; ++j) Mma<T>::mma(second[j], fa, eye[j]);
  for (int j = 0; j < 2; ++j)
    for (int i = 0; i < 4; ++i) store(c + (lane() / 4 + 8 * (i / 2)) * 16 + 8 * j + 2 * (lane() % 4) + i % 2, second[j][i]);
}

template <typename T>
void check_tiles() {
  const std::vector<bf16> a16 = random_bf16(16 * 32, 3), b16 = random_bf16(32 * 16, 4);
  std::vector<T> a, b;
  for (const bf16 v : a16) a.push_back(from_float<T>(to_float(v)));
  for (const bf16 v : b16) b.push_back(from_float<T>(to_float(v)));
  for (const bool transposed : {false, true}) {
    const Global<T> ga(a), gb(b);
    const Global<float> gc(256);
    run({1}, {32}, 48 * 40 * static_cast<int>(sizeof(T)), tile_product<T>, ga.get(), gb.get(), gc.get(), transposed);
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 16; ++j) {
        double want = 0;
        for (int k = 0; k < 32; ++k) want += double{to_float(a16[static_cast<size_t>(i * 32 + k)])} * to_float(b16[static_cast<size_t>(transposed ? k * 16 + j : j * 32 + k)]);
        CHECK(gc.host()[static_cast<size_t>(i * 16 + j)] == Approx(want).epsilon(1e-5).margin(1e-5));
      }
  }
  const Global<T> ga(a);
  const Global<float> gc(256);
  run({1}, {32}, 2 * 16 * 24 * static_cast<int>(sizeof(T)), tile_chain<T>, ga.get(), gc.get());
  for (size_t i = 0; i < 256; ++i) CHECK(gc.host()[i] == to_float(a16[i]));
}

}  // namespace

TEST_CASE("mma.m16n8k16 has the fragments of the PTX manual", "[cuda]") {
  const std::vector<bf16> a = random_bf16(256, 1), b = random_bf16(128, 2);
  std::vector<uint32_t> ra(128, 0), rb(64, 0);
  std::vector<float> rc(128);
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < 8; ++i) ra[static_cast<size_t>(4 * l + i / 2)] |= static_cast<uint32_t>(a[static_cast<size_t>(place_a(l, i).row * 16 + place_a(l, i).col)].bits) << (16 * (i % 2));
    for (int i = 0; i < 4; ++i) rb[static_cast<size_t>(2 * l + i / 2)] |= static_cast<uint32_t>(b[static_cast<size_t>(place_b(l, i).row * 8 + place_b(l, i).col)].bits) << (16 * (i % 2));
    for (int i = 0; i < 4; ++i) rc[static_cast<size_t>(4 * l + i)] = static_cast<float>(place_c(l, i).row * 8 + place_c(l, i).col);
  }
  const Global<uint32_t> ga(ra), gb(rb);
  const Global<float> gc(rc);
  run({1}, {32}, 0, one_mma, ga.get(), gb.get(), gc.get());
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) {
      const Place p = place_c(l, i);
      double want = p.row * 8 + p.col;
      for (int k = 0; k < 16; ++k) want += double{to_float(a[static_cast<size_t>(p.row * 16 + k)])} * to_float(b[static_cast<size_t>(k * 8 + p.col)]);
      CHECK(gc.host()[static_cast<size_t>(4 * l + i)] == Approx(want).epsilon(1e-5).margin(1e-5));
    }
}

// PTX manual, "ldmatrix": with .x4 lanes 8 m .. 8 m + 7 name the rows of matrix m; lane l receives of row l / 4 the elements
// 2 (l % 4) and 2 (l % 4) + 1, the lower one in the lower half; .trans loads each matrix in column-major order.
TEST_CASE("ldmatrix has the layout of the PTX manual", "[cuda]") {
  std::vector<bf16> values(256);
  for (size_t i = 0; i < 256; ++i) values[i].bits = static_cast<uint16_t>(i);  // matrix m, row r, column c: 64 m + 8 r + c
  const Global<bf16> p(values);
  const Global<uint32_t> out(128);
  run({1}, {32}, 512, load_matrices, p.get(), out.get(), false);
  CHECK(out.host()[0] == (1u << 16 | 0));                          // lane 0, matrix 0: (0, 0), (0, 1)
  CHECK(out.host()[4 * 5 + 1] == (static_cast<uint32_t>(64 + 8 + 3) << 16 | (64 + 8 + 2)));  // lane 5, matrix 1: (1, 2), (1, 3)
  for (uint32_t l = 0; l < 32; ++l)
    for (uint32_t m = 0; m < 4; ++m) CHECK(out.host()[4 * l + m] == ((64 * m + 8 * (l / 4) + 2 * (l % 4) + 1) << 16 | (64 * m + 8 * (l / 4) + 2 * (l % 4))));
  run({1}, {32}, 512, load_matrices, p.get(), out.get(), true);
  CHECK(out.host()[0] == (8u << 16 | 0));  // (0, 0), (1, 0)
  for (uint32_t l = 0; l < 32; ++l)
    for (uint32_t m = 0; m < 4; ++m) CHECK(out.host()[4 * l + m] == ((64 * m + 8 * (2 * (l % 4) + 1) + l / 4) << 16 | (64 * m + 8 * 2 * (l % 4) + l / 4)));
}

TEST_CASE("tiles multiply in bf16 and in fp32", "[cuda]") {
  check_tiles<bf16>();
  check_tiles<float>();
}

TEST_CASE("a float becomes the same bf16 in a kernel as on the host", "[cuda]") {
  const Rng rng(7, RngStream::test);
  for (uint64_t i = 0; i < 20000; ++i) {
    const float f = bits_as_float(static_cast<uint32_t>(rng.bits(i)));
    REQUIRE(narrow(f).bits == to_bf16(f).bits);
    REQUIRE(float_as_bits(widen(narrow(f))) == float_as_bits(to_float(to_bf16(f))));
  }
}

// ---- faults ----------------------------------------------------------------------------------------------------------------

namespace {

DS_KERNEL void reads_unwritten() {
  const Shared<float> s(0, 64);
  if (thread() < 32) s.set(thread(), 1);
  sync_block();
  const float v = s[thread()];  // half of them were never written
  s.set(thread(), v);
}
DS_KERNEL void reads_behind_array() {
  const Shared<float> s(0, 32);
  s.set(thread(), 1);
  sync_block();
  const float v = s[thread() + 1];
  sync_block();
  s.set(thread(), v);
}
DS_KERNEL void array_beyond_launch() { const Shared<float> s(64, 32); }
DS_KERNEL void forgets_barrier() {
  const Shared<float> s(0, 64);
  s.set(thread(), 1);
  s.set(thread(), s[63 - thread()]);
}
DS_KERNEL void forgets_second_barrier() {
  const Shared<float> s(0, 64);
  s.set(thread(), 1);
  sync_block();
  const float v = s[63 - thread()];
  s.set(thread(), v);  // others may still read it
}
DS_KERNEL void writes_one_element() {
  const Shared<int> s(0, 1);
  s.set(0, 5);
}
DS_KERNEL void shuffle_is_no_barrier() {
  const Shared<float> s(0, 32);
  s.set(thread(), 1);
  shuffle(1, 0);
  s.set(thread(), s[31 - thread()]);
}
DS_KERNEL void warp_barrier_for_block() {
  const Shared<float> s(0, 64);
  s.set(thread(), 1);
  sync_warp();
  const float v = s[63 - thread()];
  sync_warp();
  s.set(thread(), v);
}
DS_KERNEL void warp_barrier_is_enough() {
  const Shared<float> s(0, 64);
  s.set(thread(), 1);
  sync_warp();
  const float v = s[thread() ^ 31];
  sync_warp();
  s.set(thread(), v);
}
DS_KERNEL void barrier_in_a_branch() {
  if (thread() < 32) sync_block();
}
DS_KERNEL void two_barriers() {
  if (thread() < 32) sync_block();
  else sync_block();
}
DS_KERNEL void lanes_missing() {
  if (thread() < 16) shuffle(1, 0);
}
DS_KERNEL void lane_outside_mask() {
  if (thread() < 16) shuffle(1, 20, 0xffffu);
}
DS_KERNEL void not_in_own_mask() { vote_ballot(true, 0xffffu); }
DS_KERNEL void masks_differ() { vote_ballot(true, thread() < 16 ? 0xffffffffu : 0x7fffffffu | 1u << thread()); }
DS_KERNEL void different_collectives() {
  if (thread() < 16) shuffle(1, 0);
  else vote_ballot(true);
}
DS_KERNEL void misaligned_shared() {
  const Shared<float> s(0, 64);
  s.set_vector(2 * thread() % 32 + 1, Vector<float, 2>{{1, 2}});
}
DS_KERNEL void misaligned_global(float* p) { store(reinterpret_cast<Vector<float, 4>*>(p + 1), Vector<float, 4>{}); }
DS_KERNEL void behind_allocation(float* p) { store(p + 8 + thread(), 1.0f); }
DS_KERNEL void through_null(float* p) { load(p); }
DS_KERNEL void copy_not_waited(const float* p) {
  const Shared<float> s(0, 128);
  cp_async16(s, 4 * thread(), p + 4 * thread());
  cp_async_commit();
  s.set(4 * thread(), s[4 * thread()]);
}
DS_KERNEL void copy_waits_for_older(const float* p) {
  const Shared<float> s(0, 256);
  cp_async16(s, 4 * thread(), p + 4 * thread());
  cp_async_commit();
  cp_async16(s, 128 + 4 * thread(), p + 4 * thread());
  cp_async_commit();
  cp_async_wait<1>();
  s.set(4 * thread(), s[4 * thread()]);
  s.set(4 * thread(), s[128 + 4 * thread()]);  // still on its way
}
DS_KERNEL void copy_without_barrier(const float* p) {
  const Shared<float> s(0, 128);
  cp_async16(s, 4 * thread(), p + 4 * thread());
  cp_async_commit();
  cp_async_wait<0>();
  s[127 - 4 * thread()];
}
DS_KERNEL void copy_left_alone(const float* p) {
  const Shared<float> s(0, 128);
  cp_async16(s, 4 * thread(), p + 4 * thread());
}
DS_KERNEL void copy_right(const float* p, float* out) {
  const Shared<float> s(0, 128);
  cp_async16(s, 4 * thread(), p + 4 * thread(), thread() < 16);
  cp_async_commit();
  cp_async_wait<0>();
  sync_block();
  for (int i = 0; i < 4; ++i) store(out + 4 * thread() + i, s[127 - 4 * thread() - i]);
}
DS_KERNEL void copy_misaligned(const float* p) {
  const Shared<float> s(0, 128);
  cp_async16(s, 2, p);
}
DS_KERNEL void nothing() {}

void finds(const char* message, int threads, int shared_bytes, void (*kernel)()) {
  INFO(message);
  always([&] { CHECK_THROWS_WITH(run(threads, shared_bytes, kernel), Contains(message)); });
}
template <typename P>
void finds(const char* message, int threads, int shared_bytes, void (*kernel)(P), P argument) {
  INFO(message);
  always([&] { CHECK_THROWS_WITH(run({1}, {static_cast<unsigned>(threads)}, shared_bytes, kernel, argument), Contains(message)); });
}

}  // namespace

TEST_CASE("the emulation finds wrong uses of shared memory", "[cuda]") {
  finds("which nobody has written", 64, 256, reads_unwritten);
  finds("element 32 of a shared array of 32", 32, 128, reads_behind_array);
  finds("does not fit into the 128 bytes", 32, 128, array_beyond_launch);
  finds("misaligned write of 8 shared bytes", 32, 256, misaligned_shared);
}

TEST_CASE("the emulation finds races between barriers", "[cuda]") {
  // Which side comes second depends on the order, that there is a race does not.
  for (uint64_t seed = 0; seed < 8; ++seed) {
    emulation::set_seed(seed);
    CHECK_THROWS_AS(run(64, 256, forgets_barrier), emulation::Fault);
  }
  finds("race: ", 64, 256, forgets_second_barrier);
  finds("with no barrier before this write", 32, 4, writes_one_element);
  CHECK_NOTHROW(run(64, 256, warp_barrier_is_enough));
  for (uint64_t seed = 0; seed < 8; ++seed) {
    emulation::set_seed(seed);
    CHECK_THROWS_AS(run(64, 256, warp_barrier_for_block), emulation::Fault);
  }
  finds("race: ", 32, 128, shuffle_is_no_barrier);
}

TEST_CASE("the emulation finds divergent barriers and collectives", "[cuda]") {
  finds("divergent barrier: of 64 threads 32 at sync_block", 64, 0, barrier_in_a_branch);
  finds("divergent barrier: some threads wait at", 64, 0, two_barriers);
  finds("lanes 0xffff0000 do not come; 16 at a warp collective", 32, 0, lanes_missing);
  finds("reads from lane 20, which is not in the mask", 32, 0, lane_outside_mask);
  finds("is not in its own mask", 32, 0, not_in_own_mask);
  finds("disagree about the mask", 32, 0, masks_differ);
  finds("the lanes of a warp diverge", 32, 0, different_collectives);
}

TEST_CASE("the emulation finds wrong accesses of global memory", "[cuda]") {
  const Global<float> p(16);
  finds("misaligned write of 16 global bytes", 32, 0, misaligned_global, p.get());
  finds("outside every allocation", 32, 0, behind_allocation, p.get());
  finds("through a null pointer", 32, 0, through_null, static_cast<float*>(nullptr));
  float* gone = nullptr;
  {
    const Global<float> q(64);
    gone = q.get();
  }
  finds("outside every allocation", 32, 0, behind_allocation, gone);
  CHECK_THROWS_WITH(emulation::free_global(gone), Contains("no allocation"));
  CHECK(std::isnan(p.host()[3]));  // poison
}

TEST_CASE("the emulation finds asynchronous copies that were not waited for", "[cuda]") {
  std::vector<float> v(128);
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i + 1);
  const Global<float> p(v), out(128);
  finds<const float*>("was not waited for", 32, 512, copy_not_waited, p.get());
  finds<const float*>("was not waited for", 32, 1024, copy_waits_for_older, p.get());
  finds<const float*>("misaligned asynchronous copy", 32, 512, copy_misaligned, p.get());
  finds<const float*>("ended before its asynchronous copies", 32, 512, copy_left_alone, p.get());
  for (uint64_t seed = 0; seed < 8; ++seed) {
    emulation::set_seed(seed);
    CHECK_THROWS_AS(run({1}, {32}, 512, copy_without_barrier, static_cast<const float*>(p.get())), emulation::Fault);
  }
  run({1}, {32}, 512, copy_right, static_cast<const float*>(p.get()), out.get());
  for (size_t i = 0; i < 128; ++i) CHECK(out.host()[i] == (127 - i < 64 ? static_cast<float>(128 - i) : 0.0f));
}

TEST_CASE("the emulation refuses launches that the driver would", "[cuda]") {
  const auto starts = [](Dim grid, Dim block, int shared) { run(grid, block, shared, nothing); };
  CHECK_NOTHROW(starts({2, 3}, {1024}, 163 << 10));
  CHECK_THROWS_WITH(starts({0}, {32}, 0), Contains("a grid of 0 x 1"));
  CHECK_THROWS_WITH(starts({1, 65536}, {32}, 0), Contains("65535"));
  CHECK_THROWS_WITH(starts({1}, {1056}, 0), Contains("1056"));
  CHECK_THROWS_WITH(starts({1}, {48}, 0), Contains("whole warps"));
  CHECK_THROWS_WITH(starts({1}, {32}, (163 << 10) + 1), Contains("shared memory"));
  CHECK_THROWS_WITH(load(static_cast<const float*>(nullptr)), Contains("null"));
  CHECK_THROWS_WITH(thread(), Contains("outside a kernel"));
}

TEST_CASE("emulated streams run late, in any order that events allow", "[cuda]") {
  int differs = 0, late = 0;
  for (uint64_t seed = 0; seed < 64; ++seed) {
    emulation::set_seed(seed);
    emulation::StreamState *a = emulation::create_stream(), *b = emulation::create_stream();
    emulation::EventState* e = emulation::create_event();
    std::string log;
    emulation::enqueue(a, [&] { log += "1"; });
    emulation::enqueue(b, [&] { log += "x"; });
    emulation::enqueue(a, [&] { log += "2"; });
    emulation::record(a, e);
    emulation::wait(b, e);
    emulation::enqueue(b, [&] { log += "y"; });
    emulation::enqueue(a, [&] { log += "3"; });
    late += log.size() < 5 ? 1 : 0;
    emulation::synchronize(e);
    CHECK(emulation::happened(e));
    emulation::synchronize(b);
    const auto at = [&](char c) { return log.find(c); };
    CHECK(at('1') < at('2'));
    CHECK(at('2') < at('y'));  // across streams, by the event
    CHECK(at('x') < at('y'));
    differs += at('x') < at('1') ? 1 : 0;
    emulation::synchronize_all();
    CHECK(log.size() == 5);
    emulation::destroy_event(e);
    emulation::destroy_stream(a);
    emulation::destroy_stream(b);
  }
  CHECK(late > 8);
  CHECK(differs > 8);
  CHECK(differs < 56);
}

TEST_CASE("an emulated stream that waits for nothing is a fault", "[cuda]") {
  emulation::StreamState *a = emulation::create_stream(), *b = emulation::create_stream();
  emulation::EventState *e = emulation::create_event(), *f = emulation::create_event();
  emulation::enqueue(a, [] {});
  emulation::record(a, e);
  emulation::wait(b, e);
  CHECK_NOTHROW(emulation::synchronize(b));
  emulation::synchronize_all();
  CHECK_THROWS_WITH(emulation::enqueue(nullptr, [] {}), Contains("does not exist"));
  CHECK_NOTHROW(emulation::synchronize(f));  // never recorded: it has happened, as CUDA has it
  for (emulation::EventState* event : {e, f}) emulation::destroy_event(event);
  emulation::enqueue(a, [] { throw emulation::Fault("a kernel's fault"); });
  CHECK_THROWS_WITH(emulation::synchronize_all(), Contains("a kernel's fault"));
  emulation::synchronize_all();
  emulation::destroy_stream(a);
  emulation::destroy_stream(b);
}
