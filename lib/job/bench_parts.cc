#include "job/bench_parts.h"

#include <algorithm>
#include <tuple>

#include "core/log.h"
#include "job/bench_machine.h"
#include "model/ops_plan/counts.h"

namespace dspark::job {

using namespace model;

namespace {

double over(double work, double rate) { return rate > 0 ? work / rate : 0; }

struct Book {
  const Machine& machine;
  std::map<std::tuple<Part, bool, Work>, PartTime> parts;  // the work tells the optimizer's lines apart

  void add(const std::vector<PlanEntry>& entries, double seconds) {
    const Label label = entries.front().label;
    const bool loss = label.part == Part::target_vocab && entries.size() > 1;
    PartTime& t = parts[{loss ? Part::draft_vocab : label.part, label.backward, label.part == Part::optimizer ? entries.front().work : Work::rows}];
    t.measured += seconds;
    t.predicted += total_seconds(predict(entries, machine));
    for (const PlanEntry& e : entries)
      if (e.work != Work::upload) t.at_limit += std::max(over(e.counts.flops, machine.peak_flops), over(e.counts.bytes(), machine.peak_bytes));
  }
};

class TimedDevice final : public Device {
 public:
  TimedDevice(Device& inner, Book& book) : inner_(inner), book_(book) {}
  std::string name() const override { return inner_.name(); }
  DType act_dtype() const override { return inner_.act_dtype(); }
  DType acc_dtype() const override { return inner_.acc_dtype(); }
  Address allocate(int64_t bytes) override { return inner_.allocate(bytes); }
  void free(Address a) override { inner_.free(a); }
  Event upload(Queue q, const Tensor& dst, const ConstHostMatrix& src) override {
    const double start = now_s();
    const Event e = inner_.upload(q, dst, src);
    inner_.synchronize(e);
    book_.add({{{Part::upload, false}, Work::upload, {0, 0, static_cast<double>(dst.size() * dtype_bytes(src.dtype)), 1}}}, now_s() - start);
    return e;
  }
  Event download(Queue q, const HostMatrix& dst, const Tensor& src) override { return inner_.download(q, dst, src); }
  Event record(Queue q) override { return inner_.record(q); }
  void wait(Queue q, Event e) override { inner_.wait(q, e); }
  void synchronize(Event e) override { inner_.synchronize(e); }
  double time(const std::function<void()>& work) override { return inner_.time(work); }
  int64_t memory_bytes() const override { return inner_.memory_bytes(); }

 private:
  Device& inner_;
  Book& book_;
};

class TimedOps final : public Ops {
 public:
  TimedOps(Context& inner, Book& book) : inner_(inner), book_(book) {}
#define DS_IMPLEMENT(name, Args)                                                                \
  void name(Context& ctx, const Args& a) override {                                             \
    book_.add(plan::entries(a, ctx.label()), inner_.device().time([&] { inner_.ops().name(inner_, a); })); \
  }
  DS_OPS(DS_IMPLEMENT)
#undef DS_IMPLEMENT

 private:
  Context& inner_;
  Book& book_;
};

}  // namespace

struct TimedBackend::Impl {
  Impl(Context& inner, const Machine& machine) : book{machine, {}}, ops(inner, book), device(inner.device(), book), context(ops, device) {}
  Book book;
  TimedOps ops;
  TimedDevice device;
  Context context;
};

TimedBackend::TimedBackend(Context& inner, const Machine& machine) : impl_(std::make_unique<Impl>(inner, machine)) {}
TimedBackend::~TimedBackend() = default;
Context& TimedBackend::context() { return impl_->context; }
void TimedBackend::reset() { impl_->book.parts.clear(); }

std::vector<PartTime> TimedBackend::rows() const {
  std::vector<PartTime> all;
  for (const auto& [key, time] : impl_->book.parts) {
    PartTime t = time;
    const auto [part, backward, work] = key;
    t.name = part == Part::draft_vocab ? "vocabulary loss" : std::string(part_name(part)) + (backward ? ", backward" : "");
    if (part == Part::optimizer) t.name += std::string(", ") + work_name(work);
    all.push_back(t);
  }
  return all;
}

}  // namespace dspark::job
