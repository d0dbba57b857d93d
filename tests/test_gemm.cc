#include <catch2/catch.hpp>

#include "core/error.h"
#include "core/rng.h"
#include "job/bench_gemm.h"
#include "model/ops_cpu/gemm.h"
#include "model/ops_cpu/gemm_table.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

using namespace dspark;
using namespace dspark::model::cpu;

namespace {

// Logical numbers [rows, k] of an operand, already rounded to bf16 where it will hold that.
struct Values {
  int64_t rows, k;
  std::vector<float> v;
  Values(int64_t rows, int64_t k, DType dtype, uint64_t seed) : rows(rows), k(k), v(static_cast<size_t>(rows * k)) {
    const Rng rng(seed, RngStream::test);
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] = static_cast<float>(rng.normal(i));
      if (dtype == DType::bf16) v[i] = to_float(to_bf16(v[i]));
    }
  }
};

// Those numbers in memory, [rows, k] or transposed, with `gap` unused elements behind every row, which hold NaN.
struct Matrix {
  int64_t stride;
  DType dtype;
  std::vector<float> f;
  std::vector<bf16> h;
  Matrix(const Values& x, bool transposed, DType dtype, int64_t gap)
      : stride((transposed ? x.rows : x.k) + gap), dtype(dtype),
        f(static_cast<size_t>((transposed ? x.k : x.rows) * stride + 1), std::numeric_limits<float>::quiet_NaN()),
        h(f.size(), bf16{0x7fff}) {
    for (int64_t i = 0; i < x.rows; ++i)
      for (int64_t j = 0; j < x.k; ++j) {
        const size_t o = static_cast<size_t>(transposed ? j * stride + i : i * stride + j);
        f[o] = x.v[static_cast<size_t>(i * x.k + j)];
        h[o] = to_bf16(f[o]);
      }
  }
  MatRef ref(int64_t row = 0) const {
    const size_t o = static_cast<size_t>(row * stride);
    return {dtype == DType::bf16 ? static_cast<const void*>(h.data() + o) : f.data() + o, dtype, stride};
  }
};

// Output with a guard row above and below and guard columns, all of one bit pattern.
struct Output {
  static constexpr uint8_t kGuard = 0xa5;
  int64_t rows, cols, stride;
  DType dtype;
  std::vector<uint8_t> bytes;
  Output(int64_t rows, int64_t cols, DType dtype, int64_t gap)
      : rows(rows), cols(cols), stride(cols + gap), dtype(dtype),
        bytes(static_cast<size_t>((rows + 2) * stride * dtype_bytes(dtype)), kGuard) {}
  uint8_t* row(int64_t i) { return bytes.data() + (i + 1) * stride * dtype_bytes(dtype); }
  MatOut out() { return {row(0), dtype, stride}; }
  void set(int64_t i, int64_t j, float v) { std::memcpy(row(i) + j * 4, &v, 4); }
  double at(int64_t i, int64_t j) {
    if (dtype == DType::bf16) {
      bf16 v;
      std::memcpy(&v, row(i) + j * 2, 2);
      return static_cast<double>(to_float(v));
    }
    float v;
    std::memcpy(&v, row(i) + j * 4, 4);
    return static_cast<double>(v);
  }
  bool guards_intact() {
    const int64_t e = dtype_bytes(dtype), b = stride * e;
    for (int64_t i = -1; i <= rows; ++i)
      for (int64_t o = i < 0 || i == rows ? 0 : cols * e; o < b; ++o)
        if (row(i)[o] != kGuard) return false;
    return true;
  }
};

enum class Form { nt, nn, tn, packed_nt, packed_nn };
const std::vector<Form> kForms = {Form::nt, Form::nn, Form::tn, Form::packed_nt, Form::packed_nn};
const char* form_name(Form f) {
  return std::vector<const char*>{"nt", "nn", "tn", "packed_nt", "packed_nn"}[static_cast<size_t>(f)];
}
bool a_transposed(Form f) { return f == Form::tn; }
bool b_transposed(Form f) { return f == Form::nt || f == Form::packed_nt; }

struct Aligned {
  std::vector<uint8_t> bytes;
  explicit Aligned(int64_t n) : bytes(static_cast<size_t>(n + 64)) {}
  void* data() { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64); }
};

void multiply(GemmContext& ctx, Form form, int64_t m, int64_t n, int64_t k, MatRef a, MatRef b, MatOut c, bool add) {
  if (form == Form::nt) return gemm_nt(ctx, m, n, k, a, b, c, add);
  if (form == Form::nn) return gemm_nn(ctx, m, n, k, a, b, c, add);
  if (form == Form::tn) return gemm_tn(ctx, m, n, k, a, b, c, add);
  Aligned memory(packed_b_bytes(ctx.kernel(), b.dtype, n, k));
  const PackedB packed = form == Form::packed_nt ? pack_b_nt(ctx, n, k, b, memory.data())
                                                 : pack_b_nn(ctx, n, k, b, memory.data());
  gemm_packed(ctx, m, n, k, a, packed, c, add);
}

// Sums of a product in double: of the terms, and of their magnitudes.
struct Reference {
  int64_t m, n, k;
  std::vector<double> sum, sum_abs;
  Reference(const Values& a, const Values& b) : m(a.rows), n(b.rows), k(a.k) {
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double s = 0, s_abs = 0;
        const float *x = a.v.data() + i * k, *y = b.v.data() + j * k;
        for (int64_t l = 0; l < k; ++l) {
          const double product = static_cast<double>(x[l]) * static_cast<double>(y[l]);
          s += product;
          s_abs += std::abs(product);
        }
        sum.push_back(s);
        sum_abs.push_back(s_abs);
      }
  }
};

// |error| of an fp32 sum of K products is at most gamma_K * sum |a b| (Higham, 3.1) for any order, one more rounding a K
// block and for `add`; VDPBF16PS and AMX round twice a pair and flush denormals, which is inside K + 8 too. A bf16 result
// is rounded once more: 2^-9 relative to the computed value, so less than 2^-8 of the exact one.
double bound(int64_t k, double sum_abs, DType out, double value) {
  const double eps = 0x1p-24;
  double b = static_cast<double>(k + 8) * eps * sum_abs + 1e-37;
  if (out == DType::bf16) b += 0x1p-8 * std::abs(value);
  return b;
}

void check_product(GemmContext& ctx, Form form, const Reference& ref, const Matrix& a, const Matrix& b, DType out,
                   bool add) {
  CAPTURE(ctx.kernel().name(), form_name(form), ref.m, ref.n, ref.k, dtype_name(a.dtype), dtype_name(out), add);
  Output c(ref.m, ref.n, out, 7);
  if (add)
    for (int64_t i = 0; i < ref.m; ++i)
      for (int64_t j = 0; j < ref.n; ++j) c.set(i, j, static_cast<float>(i - j));
  multiply(ctx, form, ref.m, ref.n, ref.k, a.ref(), b.ref(), c.out(), add);
  int64_t bad = 0;
  for (int64_t i = 0; i < ref.m; ++i)
    for (int64_t j = 0; j < ref.n; ++j) {
      const size_t o = static_cast<size_t>(i * ref.n + j);
      const double before = add ? static_cast<double>(i - j) : 0, want = ref.sum[o] + before;
      bad += !(std::abs(c.at(i, j) - want) <= bound(ref.k, ref.sum_abs[o] + std::abs(before), out, want));
    }
  CHECK(c.guards_intact());
  CHECK(bad == 0);
}

}  // namespace

TEST_CASE("every kernel computes every form, type and hostile shape", "[gemm]") {
  struct Shape {
    int64_t m, n, k;
  };
  // 0, 1, odd, one under and over the tiles (6x16, 14x32, 32x32), the row, column and K blocks (192, 512, 512/1024).
  const std::vector<Shape> shapes = {{0, 3, 3},   {3, 0, 3},    {3, 3, 0},    {1, 1, 1},      {1, 33, 2},    {2, 31, 3},
                                     {7, 17, 31}, {13, 32, 32}, {14, 33, 33}, {15, 65, 63},   {33, 8, 65},   {31, 9, 1},
                                     {17, 5, 513}, {3, 40, 1025}, {5, 7, 2051}, {193, 33, 47}, {29, 545, 29}, {387, 515, 5}, {391, 520, 1100}};
  ThreadPool pool(2);
  const auto kernels = available_kernels();
  for (const Shape& s : shapes)
    for (DType in : {DType::f32, DType::bf16}) {
      const Values x(s.m, s.k, in, 1), y(s.n, s.k, in, 2);
      const Reference ref(x, y);
      const Matrix a(x, false, in, 3), at(x, true, in, 2), bt(y, false, in, 5), b(y, true, in, 1);
      for (const Kernel* kernel : kernels) {
        GemmContext ctx(pool, *kernel);
        for (Form form : kForms) {
          const Matrix& left = a_transposed(form) ? at : a;
          const Matrix& right = b_transposed(form) ? bt : b;
          check_product(ctx, form, ref, left, right, DType::f32, false);
          check_product(ctx, form, ref, left, right, DType::f32, true);
          check_product(ctx, form, ref, left, right, DType::bf16, false);
        }
      }
    }
}

TEST_CASE("operands of mixed types", "[gemm]") {
  ThreadPool pool(1);
  for (const Kernel* kernel : available_kernels()) {
    GemmContext ctx(pool, *kernel);
    CAPTURE(kernel->name());
    const int64_t m = 19, n = 37, k = 67;
    for (const bool half_a : {false, true}) {
      // The f32 operand holds bf16 values, so that rounding it changes nothing and both are exact products.
      Matrix a(Values(m, k, DType::bf16, 1), false, DType::bf16, 1);
      Matrix b(Values(n, k, DType::bf16, 2), false, DType::bf16, 1);
      Output same(m, n, DType::f32, 1), mixed(m, n, DType::f32, 1);
      gemm_nt(ctx, m, n, k, a.ref(), b.ref(), same.out());
      (half_a ? b : a).dtype = DType::f32;
      gemm_nt(ctx, m, n, k, a.ref(), b.ref(), mixed.out());
      int64_t bad = 0;
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) bad += !(std::abs(same.at(i, j) - mixed.at(i, j)) <= 1e-4);
      CHECK(bad == 0);
    }
  }
}

TEST_CASE("a row's bits depend neither on M, on N, on threads nor on packing", "[gemm]") {
  ThreadPool one(1), two(2), five(5);
  for (const Kernel* kernel : available_kernels()) {
    GemmContext ctx1(one, *kernel), ctx2(two, *kernel), ctx5(five, *kernel);
    for (DType in : {DType::f32, DType::bf16})
      for (DType out : {DType::f32, DType::bf16})
        for (int64_t k : {61, 1061}) {
          const int64_t m = 197, n = 523;
          CAPTURE(kernel->name(), dtype_name(in), dtype_name(out), k);
          const Values x(m, k, in, 1), y(n, k, in, 2);
          const Matrix a(x, false, in, 3), at(x, true, in, 2), bt(y, false, in, 5), b(y, true, in, 1);
          Output all(m, n, out, 1);
          gemm_nt(ctx1, m, n, k, a.ref(), bt.ref(), all.out());
          const auto same = [&](GemmContext& ctx, Form form, const Matrix& left, const Matrix& right) {
            CAPTURE(form_name(form), ctx.pool().size());
            Output c(m, n, out, 1);
            multiply(ctx, form, m, n, k, left.ref(), right.ref(), c.out(), false);
            CHECK(c.bytes == all.bytes);
          };
          for (GemmContext* ctx : {&ctx1, &ctx2, &ctx5}) {
            same(*ctx, Form::nt, a, bt);
            same(*ctx, Form::nn, a, b);
            same(*ctx, Form::tn, at, b);
            same(*ctx, Form::packed_nt, a, bt);
            same(*ctx, Form::packed_nn, a, b);
          }
          const size_t row_bytes = static_cast<size_t>(n * dtype_bytes(out));
          for (int64_t rows : {1, 2, 3, 8, 15, 37})
            for (int64_t first : {0, 151}) {
              Output c(rows, n, out, 1);
              multiply(ctx2, Form::packed_nt, rows, n, k, a.ref(first), bt.ref(), c.out(), false);
              for (int64_t i = 0; i < rows; ++i) CHECK(std::memcmp(c.row(i), all.row(first + i), row_bytes) == 0);
            }
          for (int64_t j : {0, 31, 32, 522}) {  // one column alone
            Output c(m, 1, out, 1);
            multiply(ctx1, Form::nt, m, 1, k, a.ref(), bt.ref(j), c.out(), false);
            for (int64_t i = 0; i < m; ++i) CHECK(c.at(i, 0) == all.at(i, j));
          }
        }
  }
}

TEST_CASE("the first rows of a packed B are B's first rows", "[gemm]") {
  ThreadPool two(2);
  for (const Kernel* kernel : available_kernels()) {
    GemmContext ctx(two, *kernel);
    for (DType in : {DType::f32, DType::bf16})
      for (int64_t k : {64, 1056}) {
        const int64_t m = 45, n = 101, whole = k + 192;
        CAPTURE(kernel->name(), dtype_name(in), k);
        const Matrix a(Values(m, whole, in, 1), false, in, 3), b(Values(n, whole, in, 2), false, in, 1);
        std::vector<std::byte> memory(static_cast<size_t>(packed_b_bytes(*kernel, in, n, whole)) + 64);
        void* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
        const PackedB packed = pack_b_nt(ctx, n, whole, b.ref(), aligned), prefix = packed_prefix(packed, k);
        REQUIRE(prefix.data != nullptr);
        Output c(m, n, DType::f32, 1), d(m, n, DType::f32, 1);
        gemm_packed(ctx, m, n, k, a.ref(), prefix, c.out());
        gemm_nt(ctx, m, n, k, a.ref(), b.ref(), d.out());
        CHECK(c.bytes == d.bytes);
        CHECK(packed_prefix(packed, whole + 1).data == nullptr);
        if (in == DType::bf16 && kernel->table().k_unit_bf16 > 1) CHECK(packed_prefix(packed, k + 1).data == nullptr);
      }
  }
}

TEST_CASE("kernels are selected by name and unknown ones are refused with the list", "[gemm]") {
  const auto kernels = available_kernels();
  REQUIRE(!kernels.empty());
  CHECK(kernels.front()->name() == "base");
  for (const Kernel* kernel : kernels) CHECK(&select_kernel(kernel->name()) == kernel);
  const std::string best(select_kernel("auto").name());
  CHECK(std::any_of(kernels.begin(), kernels.end(), [&](const Kernel* k) { return k->name() == best; }));
  CHECK_THROWS_WITH(select_kernel("mmx"), Catch::Contains("'mmx' does not exist") && Catch::Contains("auto, base"));
  for (int i = 0; i < kIsaCount; ++i)
    if (!isa_supported(static_cast<Isa>(i)))
      CHECK_THROWS_WITH(select_kernel(isa_name(static_cast<Isa>(i))), Catch::Contains("is not available"));
}

TEST_CASE("NaN and infinities pass through products", "[gemm]") {
  ThreadPool pool(1);
  for (const Kernel* kernel : available_kernels()) {
    GemmContext ctx(pool, *kernel);
    CAPTURE(kernel->name());
    for (DType in : {DType::f32, DType::bf16}) {
      Matrix a(Values(3, 33, in, 1), false, in, 0), b(Values(5, 33, in, 2), false, in, 0);
      a.f[33 + 32] = std::numeric_limits<float>::quiet_NaN();
      a.h[33 + 32] = bf16{0x7fc0};
      b.f[2 * 33] = std::numeric_limits<float>::infinity();
      b.h[2 * 33] = bf16{0x7f80};
      for (DType out : {DType::f32, DType::bf16}) {
        Output c(3, 5, out, 2);
        gemm_nt(ctx, 3, 5, 33, a.ref(), b.ref(), c.out());
        for (int64_t i = 0; i < 3; ++i)
          for (int64_t j = 0; j < 5; ++j) {
            CHECK(std::isnan(c.at(i, j)) == (i == 1));
            CHECK(std::isinf(c.at(i, j)) == (i != 1 && j == 2));
          }
      }
    }
  }
}

TEST_CASE("bench_gemm measures every shape it is given against a limit", "[gemm][bench]") {
  job::BenchGemmOptions options;
  options.threads = 1;
  options.seconds_per_shape = 0;
  options.min_repeats = 3;
  options.shapes = {{"packed", 64, 64, 64, DType::bf16, DType::f32}, {"tn", 65, 33, 64, DType::f32, DType::f32}};
  const auto results = job::bench_gemm(options);
  REQUIRE(results.size() == 2);
  CHECK(results[1].what == "gemm tn f32 65x33x64");
  for (const auto& r : results) {
    CHECK(r.samples.size() == 3);
    CHECK(r.value > 0);
    CHECK(r.share_of_limit == Approx(r.value / r.limit));
    CHECK(r.kernel == select_kernel("auto").name());
  }
  options.shapes = {{"tt", 64, 64, 64, DType::bf16, DType::f32}};
  CHECK_THROWS_WITH(job::bench_gemm(options), Catch::Contains("form 'tt'"));
}
