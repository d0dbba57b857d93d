#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "cuda_emulation/block.h"
#include "cuda_emulation/fakes.h"
#include "cuda_emulation/memory.h"
#include "cuda_emulation/streams.h"

namespace dspark::emulation {
namespace {

constexpr uint64_t kAlgorithmMark = 0x616c676f72697468u;

// In the order of BlasVariant.
struct Variant {
  uint32_t splits, reduction;
  size_t workspace;
  int64_t together, least_rows;  // products that are added up before they are added to the sum; rows it takes
  double ms;
};
constexpr Variant kVariants[] = {{4, 2, 8192, 8, 1, 0.25}, {1, 0, size_t{1} << 40, 8, 1, 0.25}, {1, 0, 0, 4, 8, 0.5}, {1, 0, 12288, 16, 1, 3}, {1, 0, 0, 1 << 30, 1, 2}, {1, 0, 4096, 2, 1, 1}};

int blas_version[3] = {13, 0, 2};
std::vector<int> used;

struct Object {
  virtual ~Object() = default;
};
struct Handle : Object {};
struct Desc : Object {
  int trans_a = 0, trans_b = 0;
};
struct Layout : Object {
  int type = 0;
  int64_t rows = 0, cols = 0, ld = 0;
};
struct Preference : Object {
  uint64_t workspace = 0;
  uint32_t reductions = 0xffffffff, align[4] = {256, 256, 256, 256};
};

std::set<void*>& live() {
  static std::set<void*> objects;
  return objects;
}
void require(bool ok, const std::string& message) {
  if (!ok) throw Fault("cublasLt: " + message);
}
template <typename T>
T& get(const void* p, const char* what) {
  require(live().count(const_cast<void*>(p)) > 0, fmt::format("a {} that was not made, or is gone", what));
  T* t = dynamic_cast<T*>(static_cast<Object*>(const_cast<void*>(p)));
  require(t != nullptr, fmt::format("something else where a {} belongs", what));
  return *t;
}
template <typename T>
int create(void** out) {
  Object* o = new T;
  live().insert(o);
  *out = o;
  return 0;
}
int destroy(void* p) {
  require(live().erase(p) > 0, "destroying what was not made");
  delete static_cast<Object*>(p);
  return 0;
}

int desc_create(void** desc, int compute, int scale_type) {
  require(compute == cuda::kCompute32 && scale_type == cuda::kReal32, "sums in fp32 are wanted");
  return create<Desc>(desc);
}
int desc_set(void* p, int attribute, const void* value, size_t bytes) {
  Desc& d = get<Desc>(p, "matmul descriptor");
  require(bytes == 4 && (attribute == cuda::kDescTransA || attribute == cuda::kDescTransB), fmt::format("descriptor attribute {} of {} bytes", attribute, bytes));
  int32_t op = 0;
  std::memcpy(&op, value, 4);
  require(op == 0 || op == 1, fmt::format("operation {}", op));
  (attribute == cuda::kDescTransA ? d.trans_a : d.trans_b) = op;
  return 0;
}
int layout_create(void** out, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  require(type == cuda::kReal32 || type == cuda::kReal16b, fmt::format("a matrix of type {}", type));
  require(rows > 0 && cols > 0 && ld >= static_cast<int64_t>(rows), fmt::format("a column-major matrix [{}, {}] with leading dimension {}", rows, cols, ld));
  create<Layout>(out);
  Layout& l = get<Layout>(*out, "layout");
  l.type = type, l.rows = static_cast<int64_t>(rows), l.cols = static_cast<int64_t>(cols), l.ld = ld;
  return 0;
}
int preference_set(void* p, int attribute, const void* value, size_t bytes) {
  Preference& f = get<Preference>(p, "preference");
  if (attribute == cuda::kPreferWorkspace) {
    require(bytes == 8, "the workspace's size has 8 bytes");
    std::memcpy(&f.workspace, value, 8);
    return 0;
  }
  require(bytes == 4, fmt::format("preference {} of {} bytes", attribute, bytes));
  if (attribute == cuda::kPreferReductions) {
    std::memcpy(&f.reductions, value, 4);
  } else {
    require(attribute >= cuda::kPreferAlignA && attribute <= cuda::kPreferAlignD, fmt::format("preference {}", attribute));
    std::memcpy(&f.align[attribute - cuda::kPreferAlignA], value, 4);
  }
  return 0;
}

int64_t bytes_of(const Layout& l) { return l.type == cuda::kReal16b ? 2 : 4; }

// m, n, k of D [m, n] = op(A) op(B).
struct Sizes {
  int64_t m, n, k;
};
Sizes check_layouts(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const Sizes s{desc.trans_a ? a.cols : a.rows, desc.trans_b ? b.rows : b.cols, desc.trans_a ? a.rows : a.cols};
  require((desc.trans_b ? b.cols : b.rows) == s.k && d.rows == s.m && d.cols == s.n && c.rows == s.m && c.cols == s.n,
          fmt::format("A [{}, {}]{}, B [{}, {}]{}, D [{}, {}] do not fit", a.rows, a.cols, desc.trans_a ? "^T" : "", b.rows, b.cols, desc.trans_b ? "^T" : "", d.rows, d.cols));
  require(a.type == b.type && c.type == d.type && (d.type == cuda::kReal32 || a.type == cuda::kReal16b), "these types have no product: bf16 to bf16 or fp32, fp32 to fp32");
  return s;
}

// The algorithm carries what it was chosen for, so that it cannot be used for something else: its kind, the variant, alignments.
uint64_t mark_of(const Desc& desc, const Layout& a, const Layout& d) { return kAlgorithmMark ^ static_cast<uint64_t>(a.type + 100 * d.type + 10000 * desc.trans_a + 20000 * desc.trans_b); }

int heuristic(void* handle, void* desc_p, void* a, void* b, void* c, void* d, void* preference, int asked, cuda::BlasHeuristic* results, int* found) {
  get<Handle>(handle, "handle");
  const Preference& f = get<Preference>(preference, "preference");
  const Desc& desc = get<Desc>(desc_p, "matmul descriptor");
  const Sizes s = check_layouts(desc, get<Layout>(a, "layout"), get<Layout>(b, "layout"), get<Layout>(c, "layout"), get<Layout>(d, "layout"));
  require(asked >= 1, "no result is asked for");
  require(f.reductions == 0, "split sums are allowed: their order is not fixed");
  for (const uint32_t align : f.align) require(align >= 1 && align <= 16 && (align & (align - 1)) == 0, fmt::format("an alignment of {}", align));
  std::vector<int> offered;
  if (asked > 1) offered = {kSplitSums, kHugeWorkspace, kManyRowsOnly};  // what has no business here comes first
  for (int64_t i = 0; i < 3; ++i) offered.push_back(static_cast<int>(kSlow + (s.n / 100 + i) % 3));
  *found = 0;
  for (const int v : offered) {
    if (*found == asked || (v >= kSlow && kVariants[v].workspace > f.workspace)) continue;
    cuda::BlasHeuristic& r = results[(*found)++];
    r = {};
    r.algorithm.data[0] = mark_of(desc, get<Layout>(a, "layout"), get<Layout>(d, "layout"));
    r.algorithm.data[1] = static_cast<uint64_t>(v);
    for (int i = 0; i < 4; ++i) r.algorithm.data[2 + i] = f.align[i];
    r.workspace_bytes = kVariants[v].workspace;
  }
  return 0;
}

const Variant& variant_of(const cuda::BlasAlgorithm* a) {
  require(a != nullptr && a->data[1] < std::size(kVariants), "an algorithm that was not made here");
  return kVariants[a->data[1]];
}
int algorithm_check(void* handle, void* desc_p, void* a, void* b, void* c, void* d, const cuda::BlasAlgorithm* algorithm, cuda::BlasHeuristic* result) {
  get<Handle>(handle, "handle");
  const Desc& desc = get<Desc>(desc_p, "matmul descriptor");
  const Layout &la = get<Layout>(a, "layout"), &lb = get<Layout>(b, "layout"), &ld = get<Layout>(d, "layout");
  const Sizes s = check_layouts(desc, la, lb, get<Layout>(c, "layout"), ld);
  const Variant& v = variant_of(algorithm);
  for (const auto& [l, align] : {std::pair{&la, algorithm->data[2]}, {&lb, algorithm->data[3]}, {&ld, algorithm->data[5]}})
    if (l->ld * bytes_of(*l) % static_cast<int64_t>(align) != 0) return 15;  // CUBLAS_STATUS_NOT_SUPPORTED
  if (algorithm->data[0] != mark_of(desc, la, ld) || s.n < v.least_rows) return 15;
  *result = {};
  result->algorithm = *algorithm;
  result->workspace_bytes = v.workspace;
  return 0;
}
int algorithm_config(const cuda::BlasAlgorithm* a, int attribute, void* value, size_t bytes, size_t* written) {
  require(bytes == 4 && (attribute == cuda::kConfigSplitK || attribute == cuda::kConfigReduction), fmt::format("configuration {} of {} bytes", attribute, bytes));
  const uint32_t v = attribute == cuda::kConfigSplitK ? variant_of(a).splits : variant_of(a).reduction;
  std::memcpy(value, &v, 4);
  *written = 4;
  return 0;
}
int property(int part, int* value) {
  require(part >= 0 && part < 3, fmt::format("property {}", part));
  *value = blas_version[part];
  return 0;
}

void check_matrix(const void* p, const Layout& l, uint64_t align, bool write, const char* name) {
  require(reinterpret_cast<uintptr_t>(p) % align == 0, fmt::format("{} is not aligned to the {} bytes that were promised", name, align));
  for (int64_t j = 0; j < l.cols; ++j) check_global(static_cast<const char*>(p) + j * l.ld * bytes_of(l), l.rows * bytes_of(l), bytes_of(l), write);
}

float element(const void* p, const Layout& l, int64_t i, int64_t j) {
  return l.type == cuda::kReal16b ? to_float(static_cast<const bf16*>(p)[j * l.ld + i]) : static_cast<const float*>(p)[j * l.ld + i];
}

int matmul(void* handle, void* desc_p, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout, const void* beta, const void* c, void* c_layout, void* d,
           void* d_layout, const cuda::BlasAlgorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
  get<Handle>(handle, "handle");
  const Desc desc = get<Desc>(desc_p, "matmul descriptor");
  const Layout la = get<Layout>(a_layout, "layout"), lb = get<Layout>(b_layout, "layout"), lc = get<Layout>(c_layout, "layout"), ld = get<Layout>(d_layout, "layout");
  const Sizes s = check_layouts(desc, la, lb, lc, ld);
  const Variant& variant = variant_of(algorithm);
  require(algorithm->data[0] == mark_of(desc, la, ld), "an algorithm that was chosen for other matrices");
  require(variant.splits == 1 && variant.reduction == 0, "an algorithm whose sums have no fixed order");
  require(s.n >= variant.least_rows, fmt::format("an algorithm that does not take {} rows", s.n));
  require(c == d && lc.ld == ld.ld, "C and D are not the same matrix");
  require(workspace_bytes >= variant.workspace && reinterpret_cast<uintptr_t>(workspace) % 256 == 0, fmt::format("a workspace of {} bytes at {}", workspace_bytes, workspace));
  check_matrix(a, la, algorithm->data[2], false, "A");
  check_matrix(b, lb, algorithm->data[3], false, "B");
  check_matrix(d, ld, algorithm->data[5], true, "D");
  if (workspace_bytes > 0) check_global(workspace, static_cast<int64_t>(workspace_bytes), 256, true);
  used.push_back(static_cast<int>(algorithm->data[1]));
  float al = 0, be = 0;
  std::memcpy(&al, alpha, 4);
  std::memcpy(&be, beta, 4);
  enqueue(static_cast<StreamState*>(stream), [=] {
    check_matrix(a, la, 1, false, "A");
    check_matrix(b, lb, 1, false, "B");
    check_matrix(d, ld, 1, true, "D");
    if (workspace_bytes > 0) std::memset(workspace, 0xee, workspace_bytes);
    pass_time(variant.ms);
    for (int64_t j = 0; j < s.n; ++j)
      for (int64_t i = 0; i < s.m; ++i) {
        float sum = 0;
        for (int64_t k0 = 0; k0 < s.k; k0 += variant.together) {
          float part = 0;
          for (int64_t k = k0; k < std::min(s.k, k0 + variant.together); ++k)
            part += (desc.trans_a ? element(a, la, k, i) : element(a, la, i, k)) * (desc.trans_b ? element(b, lb, j, k) : element(b, lb, k, j));
          sum += part;
        }
        sum *= al;
        if (be != 0) sum += be * element(d, ld, i, j);
        if (ld.type == cuda::kReal16b) static_cast<bf16*>(d)[j * ld.ld + i] = to_bf16(sum);
        else static_cast<float*>(d)[j * ld.ld + i] = sum;
      }
  });
  return 0;
}

}  // namespace

void set_blas_version(int major, int minor, int patch) { blas_version[0] = major, blas_version[1] = minor, blas_version[2] = patch; }
std::vector<int> blas_variants_used() { return std::exchange(used, {}); }

int64_t live_blas_objects() { return static_cast<int64_t>(live().size()); }

const cuda::BlasApi& fake_blas() {
  static const cuda::BlasApi api = [] {
    cuda::BlasApi f;
    f.cublasLtCreate = create<Handle>, f.cublasLtDestroy = destroy, f.cublasLtMatmulDescCreate = desc_create, f.cublasLtMatmulDescSetAttribute = desc_set;
    f.cublasLtMatmulDescDestroy = destroy, f.cublasLtMatrixLayoutCreate = layout_create, f.cublasLtMatrixLayoutDestroy = destroy;
    f.cublasLtMatmulPreferenceCreate = create<Preference>, f.cublasLtMatmulPreferenceSetAttribute = preference_set, f.cublasLtMatmulPreferenceDestroy = destroy;
    f.cublasLtMatmulAlgoGetHeuristic = heuristic, f.cublasLtMatmul = matmul, f.cublasLtMatmulAlgoCheck = algorithm_check;
    f.cublasLtMatmulAlgoConfigGetAttribute = algorithm_config, f.cublasLtGetProperty = property;
    return f;
  }();
  return api;
}

}  // namespace dspark::emulation
