// The plan backend: the real step code runs on it, nothing is computed. Addresses are numbers without memory behind, so
// wide apart that an arena without a limit (capacity 0) never reaches the next one.
#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "model/backend_access.h"
#include "model/backends.h"
#include "model/ops_plan/counts.h"

namespace dspark::model {
namespace {

constexpr int64_t kSpacing =
    int64_t{1} << 44;  // 16 TiB between allocations: half a million of them fit into an address

struct Ledger {
  PlanCounts total;
  std::map<std::string, PlanCounts> by_operator;
  std::map<std::tuple<Part, bool, Work>, PlanCounts> by_entry;
  std::map<std::tuple<std::string, int64_t, int64_t, int64_t, bool>, int64_t> by_product;  // form, n, k, m, input gradient -> calls
  void count(const char* name, const std::vector<PlanEntry>& entries) {
    for (const PlanEntry& e : entries) {
      total.add(e.counts);
      by_operator[name].add(e.counts);
      by_entry[{e.label.part, e.label.backward, e.work}].add(e.counts);
    }
  }
  void count(const std::vector<PlanProduct>& products) {
    for (const PlanProduct& p : products) by_product[{p.form, p.n, p.k, p.m, p.input_gradient}] += p.calls;
  }
};

class PlanDevice final : public Device {
 public:
  PlanDevice(DType act, DType acc, Ledger& ledger) : act_(act), acc_(acc), ledger_(ledger) {}
  std::string name() const override { return "plan"; }
  DType act_dtype() const override { return act_; }
  DType acc_dtype() const override { return acc_; }

  Address allocate(int64_t bytes) override {
    DS_ASSERT(bytes >= 0, "{} bytes", bytes);
    next_ += kSpacing;
    const Address a = BackendAccess::make(static_cast<uintptr_t>(next_));
    next_ += bytes / kSpacing * kSpacing;
    live_[next_address(a)] = bytes;
    allocated_ += bytes;
    return a;
  }
  void free(Address a) override {
    const auto it = live_.find(next_address(a));
    DS_ASSERT(it != live_.end(), "freeing an address that was not allocated");
    allocated_ -= it->second;
    live_.erase(it);
  }

  // Counts what crosses the bus, in the host's dtype. A download gives zeros: nothing was computed.
  Event upload(Queue, const Tensor& dst, const ConstHostMatrix& src) override {
    DS_ASSERT(dst.rows == src.rows && dst.cols == src.cols, "upload of [{}, {}] to [{}, {}]", src.rows, src.cols,
              dst.rows, dst.cols);
    transfer("upload", {0, 0, static_cast<double>(dst.size() * dtype_bytes(src.dtype)), 1});
    return {};
  }
  Event download(Queue, const HostMatrix& dst, const Tensor& src) override {
    DS_ASSERT(dst.rows == src.rows && dst.cols == src.cols, "download of [{}, {}] to [{}, {}]", src.rows, src.cols,
              dst.rows, dst.cols);
    transfer("download", {0, static_cast<double>(src.size() * dtype_bytes(dst.dtype)), 0, 1});
    for (int64_t i = 0; i < dst.rows; ++i)
      std::memset(static_cast<char*>(dst.data) + i * dst.stride * dtype_bytes(dst.dtype), 0,
                  static_cast<size_t>(dst.cols * dtype_bytes(dst.dtype)));
    return {};
  }
  Event record(Queue) override { return {}; }
  void wait(Queue, Event) override {}
  void synchronize(Event) override {}

  int64_t allocated_bytes() const { return allocated_; }

 private:
  void transfer(const char* name, const PlanCounts& c) { ledger_.count(name, {{{Part::upload, false}, Work::upload, c}}); }
  static uintptr_t next_address(Address a) { return reinterpret_cast<uintptr_t>(BackendAccess::raw(a)); }
  DType act_, acc_;
  Ledger& ledger_;
  int64_t next_ = 0, allocated_ = 0;
  std::map<uintptr_t, int64_t> live_;
};

class PlanOps final : public Ops {
 public:
  explicit PlanOps(Ledger& ledger) : ledger_(ledger) {}
#define DS_IMPLEMENT(name, Args)                             \
  void name(Context& ctx, const Args& a) override {          \
    ledger_.count(#name, plan::entries(a, ctx.label()));     \
    ledger_.count(plan::products(a));                        \
    remember(a);                                             \
  }
  DS_OPS(DS_IMPLEMENT)
#undef DS_IMPLEMENT

  int64_t packed_bytes() const {
    int64_t sum = 0;
    for (const auto& [address, bytes] : packed_) sum += bytes;
    return sum;
  }

 private:
  template <typename Args>
  void remember(const Args&) {}
  void remember(const Refresh& a) {
    const Weight& w = *a.w;
    // Two weights may share their first byte (a head and its own left columns).
    packed_[{reinterpret_cast<uintptr_t>(BackendAccess::raw(w.value.data)), w.in()}] =
        plan::packed_bytes(w);
  }

  Ledger& ledger_;
  std::map<std::pair<uintptr_t, int64_t>, int64_t> packed_;
};

DType act_of(Precision p) {
  switch (p) {
    case Precision::bf16:
      return DType::bf16;
    case Precision::fp32:
      return DType::f32;
    case Precision::fp64:
      return DType::f64;
    case Precision::complex128:
      return DType::c128;
  }
  return DType::f32;
}

class Plan final : public PlanBackend {
 public:
  explicit Plan(Precision precision)
      : ops_(ledger_),
        device_(act_of(precision), precision == Precision::bf16 ? DType::f32 : act_of(precision), ledger_),
        context_(ops_, device_) {}
  Context& context() override { return context_; }
  std::string describe() const override {
    return fmt::format("plan, act {}, acc {}", dtype_name(device_.act_dtype()), dtype_name(device_.acc_dtype()));
  }
  const PlanCounts& counts() const override { return ledger_.total; }
  const std::map<std::string, PlanCounts>& by_operator() const override { return ledger_.by_operator; }
  std::vector<PlanEntry> entries() const override {
    std::vector<PlanEntry> all;
    for (const auto& [key, counts] : ledger_.by_entry) all.push_back({{std::get<0>(key), std::get<1>(key)}, std::get<2>(key), counts});
    return all;
  }
  std::vector<PlanProduct> products() const override {
    std::vector<PlanProduct> all;
    for (const auto& [key, calls] : ledger_.by_product) all.push_back({std::get<0>(key), std::get<3>(key), std::get<1>(key), std::get<2>(key), calls, std::get<4>(key)});
    return all;
  }
  void reset_counts() override { ledger_ = {}; }
  int64_t allocated_bytes() const override { return device_.allocated_bytes(); }
  int64_t packed_bytes() const override { return ops_.packed_bytes(); }

 private:
  Ledger ledger_;
  PlanOps ops_;
  PlanDevice device_;
  Context context_;
};

}  // namespace

std::unique_ptr<PlanBackend> make_plan_backend(const BackendOptions& options) {
  return std::make_unique<Plan>(options.precision);
}

}  // namespace dspark::model
