#include "cuda/blas.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "cuda/backend.h"
#include "cuda/library.h"
#include "model/backend_access.h"

namespace dspark::cuda {

using model::GemmChoice;

namespace {

constexpr int kCandidates = 8, kTimings = 3;
constexpr double kWorthChanging = 0.97;  // of the time; above is noise
constexpr std::string_view kName = "cublaslt ";

void check_blas(int status, const char* what) { DS_REQUIRE(status == 0, "cuda: {} failed with cuBLAS status {}", what, status); }

// Of a row-major matrix with this leading dimension: the largest power of two, up to 16, that every row's address is a multiple of.
unsigned alignment(const Matrix& m, int64_t ld) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(m.data) | static_cast<uintptr_t>(ld * (m.half ? 2 : 4));
  unsigned a = 16;
  while (bits % a != 0) a /= 2;
  return a;
}

// "cublaslt 13.0.2 sm_90 1f.20.0.3": the algorithm's words, without the zeros behind the last one.
std::string text_of(const BlasAlgorithm& a, const std::string& maker) {
  std::string text = std::string(kName) + maker;
  int words = 8;
  while (words > 1 && a.data[words - 1] == 0) --words;
  for (int i = 0; i < words; ++i) text += fmt::format("{}{:x}", i == 0 ? ' ' : '.', a.data[i]);
  return text;
}

std::optional<BlasAlgorithm> parse_words(std::string_view words) {
  BlasAlgorithm a{};
  for (uint64_t& word : a.data) {
    const std::string_view one = words.substr(0, words.find('.'));
    const auto [end, error] = std::from_chars(one.data(), one.data() + one.size(), word, 16);
    if (error != std::errc() || end != one.data() + one.size()) return std::nullopt;
    if (one.size() == words.size()) return a;
    words.remove_prefix(one.size() + 1);
  }
  return std::nullopt;
}

}  // namespace

const BlasApi& nvidia_blas() {
  static const BlasApi api = [] {
    static const Library library({"libcublasLt.so.13", "libcublasLt.so.12"}, "cuBLASLt of CUDA 13 or 12.8 (package cublas, or the PyPI package nvidia-cublas)");
    BlasApi a;
#define DS_LOAD(name, parameters) a.name = reinterpret_cast<int(*) parameters>(library.symbol(#name));
    DS_CUBLASLT(DS_LOAD)
#undef DS_LOAD
    return a;
  }();
  return api;
}

// ---- plans -----------------------------------------------------------------------------------------------------------------

// In cuBLASLt's terms: D [m, n] = A B + beta C, all column-major, with A from w, B from x and C = D.
struct Blas::Layouts {
  explicit Layouts(const BlasApi& a) : api(a) {}
  ~Layouts() {
    if (desc != nullptr) api.cublasLtMatmulDescDestroy(desc);
    for (void* layout : {x, w, d})
      if (layout != nullptr) api.cublasLtMatrixLayoutDestroy(layout);
  }
  Layouts(const Layouts&) = delete;
  Layouts& operator=(const Layouts&) = delete;
  const BlasApi& api;
  void *desc = nullptr, *x = nullptr, *w = nullptr, *d = nullptr;
};

struct Blas::Plan {
  std::unique_ptr<Layouts> layouts;
  BlasAlgorithm algorithm{};
  size_t workspace_bytes = 0;
};

std::unique_ptr<Blas::Layouts> Blas::layouts(const Key& key) const {
  auto l = std::make_unique<Layouts>(api_);
  check_blas(api_.cublasLtMatmulDescCreate(&l->desc, kCompute32, kReal32), "cublasLtMatmulDescCreate");
  const Kind& kind = key.kind;
  const int32_t op_a = kind.transpose_w ? 1 : 0, op_b = kind.transpose_x ? 1 : 0;
  check_blas(api_.cublasLtMatmulDescSetAttribute(l->desc, kDescTransA, &op_a, sizeof op_a), "cublasLtMatmulDescSetAttribute");
  check_blas(api_.cublasLtMatmulDescSetAttribute(l->desc, kDescTransB, &op_b, sizeof op_b), "cublasLtMatmulDescSetAttribute");
  const auto layout = [&](void** out, bool half, int64_t rows, int64_t cols, int64_t ld) {
    check_blas(api_.cublasLtMatrixLayoutCreate(out, half ? kReal16b : kReal32, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), ld), "cublasLtMatrixLayoutCreate");
  };
  const int64_t m = kind.cols, n = kind.transpose_x ? kind.depth : key.rows, k = kind.transpose_x ? key.rows : kind.depth;
  layout(&l->w, kind.half_in, kind.transpose_w ? k : m, kind.transpose_w ? m : k, key.ld_w);
  layout(&l->x, kind.half_in, kind.transpose_x ? n : k, kind.transpose_x ? k : n, key.ld_x);
  layout(&l->d, kind.half_d, m, n, key.ld_d);
  return l;
}

// A product of this kind with matrices as narrow as their alignment allows.
Blas::Key Blas::usual(const Kind& kind, int64_t rows) const {
  const auto up = [](int64_t cols, unsigned align, bool half) {
    const int64_t step = std::max<int64_t>(1, align / (half ? 2 : 4));
    return (cols + step - 1) / step * step;
  };
  const int64_t k = kind.transpose_x ? rows : kind.depth;
  return {kind, rows, up(kind.cols, kind.align_d, kind.half_d), up(kind.depth, kind.align_x, kind.half_in), up(kind.transpose_w ? k : kind.cols, kind.align_w, kind.half_in)};
}

std::optional<size_t> Blas::fits(const Layouts& l, const BlasAlgorithm& algorithm) const {
  BlasHeuristic r{};
  if (api_.cublasLtMatmulAlgoCheck(handle_, l.desc, l.w, l.x, l.d, l.d, &algorithm, &r) != 0 || r.state != 0 || r.workspace_bytes > static_cast<size_t>(workspace_.bytes)) return std::nullopt;
  return r.workspace_bytes;
}

const Blas::Plan& Blas::plan(const Key& key) {
  if (const auto it = plans_.find(key); it != plans_.end()) return *it->second;
  auto p = std::make_unique<Plan>();
  p->layouts = layouts(key);
  p->algorithm = choose(key.kind, key.rows);
  const auto bytes = fits(*p->layouts, p->algorithm);
  DS_REQUIRE(bytes, "cuda: the algorithm of cuBLASLt that was chosen for products with {} columns and depth {} cannot take {} rows: {}", key.kind.cols, key.kind.depth, key.rows,
             text_of(p->algorithm, maker_));
  p->workspace_bytes = *bytes;
  return *plans_.emplace(key, std::move(p)).first->second;
}

// ---- choices ---------------------------------------------------------------------------------------------------------------

Blas::Blas(const BlasApi& api, CudaDevice& device, Scratch workspace) : api_(api), device_(device), workspace_(workspace) {
  for (int part = 0; part < 3; ++part) {
    int value = 0;
    check_blas(api_.cublasLtGetProperty(part, &value), "cublasLtGetProperty");
    maker_ += (part == 0 ? "" : ".") + std::to_string(value);
  }
  maker_ += " " + device_.architecture();
  check_blas(api_.cublasLtCreate(&handle_), "cublasLtCreate");
}

void Blas::take(const std::vector<GemmChoice>& choices) {
  DS_ASSERT(plans_.empty(), "choices are taken after {} products were planned", plans_.size());
  for (const GemmChoice& c : choices) {
    const std::string_view kernel = c.kernel;
    DS_REQUIRE(kernel.starts_with(kName), "the matrix kernel '{}' of a given choice is not cuBLASLt's; use choices that were made with --device cuda", c.kernel);
    const std::string_view rest = kernel.substr(kName.size()), maker = rest.substr(0, rest.find(' ', std::min(rest.size(), rest.find(' ') + 1)));
    DS_REQUIRE(maker == maker_, "cuda: the matrix kernels were chosen by cuBLASLt {}, and {} is here, which may give other bits; go on where that is, or begin anew", maker, maker_);
    DS_REQUIRE(maker.size() < rest.size() && parse_words(rest.substr(maker.size() + 1)), "cuda: '{}' is no algorithm of cuBLASLt", c.kernel);
  }
  given_ = choices_ = choices;
}

void Blas::measure(const std::function<void()>& work) {
  struct Measuring {
    bool& on;
    explicit Measuring(bool& flag) : on(flag) { on = true; }
    ~Measuring() { on = false; }
  } const measuring(measuring_);
  work();
  device_.synchronize(device_.record(model::Queue::compute));
}

Blas::~Blas() {
  plans_.clear();
  api_.cublasLtDestroy(handle_);
}

// Those whose sums have a fixed order, as the heuristic ranks them.
std::vector<BlasAlgorithm> Blas::candidates(const Kind& kind) const {
  const auto usual_layouts = layouts(usual(kind, kUsualRows)), one_row = layouts(usual(kind, 1));
  void* preference = nullptr;
  check_blas(api_.cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](int attribute, const auto& value) {
    check_blas(api_.cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(kPreferWorkspace, static_cast<uint64_t>(workspace_.bytes));
  prefer(kPreferReductions, uint32_t{0});  // no split sums: an element's order of addition is one thread block's
  prefer(kPreferAlignA, uint32_t{kind.align_w});
  prefer(kPreferAlignB, uint32_t{kind.align_x});
  prefer(kPreferAlignC, uint32_t{kind.align_d});
  prefer(kPreferAlignD, uint32_t{kind.align_d});
  BlasHeuristic results[kCandidates] = {};
  int found = 0;
  const Layouts& l = *usual_layouts;
  const int status = api_.cublasLtMatmulAlgoGetHeuristic(handle_, l.desc, l.w, l.x, l.d, l.d, preference, kCandidates, results, &found);
  api_.cublasLtMatmulPreferenceDestroy(preference);

  const auto at_most = [&](const BlasAlgorithm& a, int attribute, uint32_t limit) {
    uint32_t value = 0;
    size_t written = 0;
    return api_.cublasLtMatmulAlgoConfigGetAttribute(&a, attribute, &value, sizeof value, &written) == 0 && value <= limit;
  };
  std::vector<BlasAlgorithm> all;
  for (int i = 0; status == 0 && i < found; ++i) {
    const BlasAlgorithm& a = results[i].algorithm;
    if (results[i].state == 0 && at_most(a, kConfigSplitK, 1) && at_most(a, kConfigReduction, 0) && fits(l, a) && fits(*one_row, a)) all.push_back(a);
  }
  DS_REQUIRE(!all.empty(), "cuda: cuBLASLt has no deterministic algorithm for products with {} columns and depth {} (status {}, {} found); a newer cuBLAS may", kind.cols, kind.depth, status, found);
  return all;
}

const BlasAlgorithm& Blas::choose(const Kind& kind, int64_t rows) {
  if (const auto it = algorithms_.find(kind); it != algorithms_.end()) return it->second;
  GemmChoice c;
  c.form = fmt::format("{}{} {}{}", kind.transpose_x ? 't' : 'n', kind.transpose_w ? 't' : 'n', kind.half_d ? "bf16" : "f32", kind.add ? " add" : "");
  if (std::min({kind.align_d, kind.align_x, kind.align_w}) < 16) c.form += fmt::format(" aligned {} {} {}", kind.align_d, kind.align_x, kind.align_w);
  c.type = kind.half_in ? DType::bf16 : DType::f32, c.n = kind.cols, c.k = kind.depth;
  BlasAlgorithm chosen{};
  const auto given = std::find_if(given_.begin(), given_.end(), [&](const GemmChoice& g) { return g.form == c.form && g.type == c.type && g.n == c.n && g.k == c.k; });
  if (given != given_.end()) {
    chosen = *parse_words(std::string_view(given->kernel).substr(kName.size() + maker_.size() + 1));
  } else {
    const std::vector<BlasAlgorithm> all = candidates(kind);
    chosen = measuring_ && all.size() > 1 ? fastest(kind, rows, all) : all.front();
    c.kernel = text_of(chosen, maker_);
    choices_.push_back(std::move(c));
  }
  return algorithms_.emplace(kind, chosen).first->second;
}

// On operands of its own, since products that add must happen once; random ones, since zeros are faster.
BlasAlgorithm Blas::fastest(const Kind& kind, int64_t rows, const std::vector<BlasAlgorithm>& among) {
  const Key key = usual(kind, rows);
  const int64_t n = kind.transpose_x ? kind.depth : rows, k = kind.transpose_x ? rows : kind.depth;
  std::vector<model::Address> owned;
  const auto operand = [&](int64_t r, int64_t c, int64_t ld, bool half) {
    owned.push_back(device_.allocate(r * ld * (half ? 2 : 4)));
    const Matrix m{model::BackendAccess::raw(owned.back()), r, c, ld, half, false};
    const Matrix whole{m.data, r, ld, ld, half, false};
    fill(device_.stream(model::Queue::compute), m.data, r, ld, ld, half ? 2 : 4, 0);
    add_noise(device_.stream(model::Queue::compute), whole, 1, {owned.size(), 0, 0});
    return m;
  };
  const Product p{operand(n, kind.cols, key.ld_d, kind.half_d),
                  kind.transpose_x ? operand(k, n, key.ld_x, kind.half_in) : operand(n, k, key.ld_x, kind.half_in),
                  kind.transpose_w ? operand(kind.cols, k, key.ld_w, kind.half_in) : operand(k, kind.cols, key.ld_w, kind.half_in), kind.transpose_x, kind.transpose_w, kind.add};
  Plan trial;
  trial.layouts = layouts(key);
  const BlasAlgorithm* best = nullptr;
  double best_s = 0;
  for (const BlasAlgorithm& a : among) {
    const auto bytes = fits(*trial.layouts, a);
    if (!bytes) continue;
    trial.algorithm = a, trial.workspace_bytes = *bytes;
    const auto once = [&] { run(device_.stream(model::Queue::compute), trial, p); };
    once();
    double seconds = device_.time(once);
    for (int i = 1; i < kTimings; ++i) seconds = std::min(seconds, device_.time(once));
    if (best == nullptr || seconds < kWorthChanging * best_s) best = &a, best_s = seconds;
  }
  device_.synchronize(device_.record(model::Queue::compute));
  for (const model::Address a : owned) device_.free(a);
  return best != nullptr ? *best : among.front();
}

// ---- products --------------------------------------------------------------------------------------------------------------

void Blas::run(Stream stream, const Plan& plan, const Product& p) const {
  const float alpha = 1, beta = p.add ? 1.0f : 0.0f;
  const Layouts& l = *plan.layouts;
  check_blas(api_.cublasLtMatmul(handle_, l.desc, &alpha, p.w.data, l.w, p.x.data, l.x, &beta, p.d.data, l.d, p.d.data, l.d, &plan.algorithm, workspace_.data, plan.workspace_bytes, stream),
             "cublasLtMatmul");
}

void Blas::multiply(Stream stream, const Product& p) {
  const int64_t n = p.d.rows, m = p.d.cols, k = p.transpose_x ? p.x.rows : p.x.cols;
  const auto ld = [](const Matrix& a) { return std::max(a.stride, a.cols); };
  DS_ASSERT((p.transpose_x ? p.x.cols : p.x.rows) == n && (p.transpose_w ? p.w.cols : p.w.rows) == k && (p.transpose_w ? p.w.rows : p.w.cols) == m && p.x.half == p.w.half,
            "a product of [{}, {}] and [{}, {}] into [{}, {}]", p.x.rows, p.x.cols, p.w.rows, p.w.cols, n, m);
  if (n == 0 || m == 0 || (k == 0 && p.add)) return;
  if (k == 0) return fill(stream, p.d.data, n, m, p.d.stride, p.d.half ? 2 : 4, 0);
  const Kind kind{m, p.transpose_x ? n : k, alignment(p.d, ld(p.d)), alignment(p.x, ld(p.x)), alignment(p.w, ld(p.w)), p.d.half, p.x.half, p.transpose_x, p.transpose_w, p.add};
  run(stream, plan({kind, p.x.rows, ld(p.d), ld(p.x), ld(p.w)}), p);
}

}  // namespace dspark::cuda
