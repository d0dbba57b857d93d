// Collectives of cuda ranks over NCCL. Tensors go through NCCL on the communication stream; host values, and the news that a rank
// failed, through the mesh.
//
//   shard group of this rank    comms_[0], rank = place in the group        reduce, broadcast, all-reduce of norms
//   owners at the same place    comms_[1], rank = number of the group       all-reduce of what they own; with several groups only
//
// NCCL's sums are in ring order, which is the same in every run on the same machines: NCCL_ALGO=Ring is set unless it is set already.
// A kernel of NCCL's waits for its peers for ever. So the host never waits for the device without looking around (CudaDevice::set_watch):
// a peer's last words on the mesh, NCCL's own errors and the deadline end the communicators, and with them the kernels. The watchdog does
// the same where the host waits inside the driver, which holds it up when too many launches are queued.
#include "cuda/nccl.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "core/log.h"
#include "cuda/library.h"
#include "model/backend_access.h"
#include "net/mesh.h"

namespace dspark::cuda {

using model::Queue;
using model::Tensor;

const Nccl& nvidia_nccl() {
  static const Nccl nccl = [] {
    static const Library library({kNcclFile}, kNcclWanted);
    Nccl n;
#define DS_LOAD(result, name, parameters) n.name = reinterpret_cast<result(*) parameters>(library.symbol(#name));
    DS_NCCL(DS_LOAD)
#undef DS_LOAD
    return n;
  }();
  return nccl;
}

namespace {

constexpr double kPatience = 10;  // seconds, with others that leave too

int type_of(DType t) {
  switch (t) {
    case DType::f32: return kNcclFloat32;
    case DType::f64: return kNcclFloat64;
    case DType::bf16: return kNcclBfloat16;
    default: DS_ASSERT(false, "a tensor of {} between ranks", dtype_name(t)); return -1;
  }
}

class NcclCollectives final : public model::Collectives {
 public:
  NcclCollectives(CudaDevice& device, net::Mesh& mesh, const NcclOptions& options, const Nccl& nccl);
  ~NcclCollectives() override;
  int64_t rank() const override { return mesh_.rank(); }
  int64_t size() const override { return mesh_.size(); }
  int64_t group() const override { return group_; }
  std::string describe() const override { return fmt::format("{} ranks, NCCL {}.{}.{}", size(), version_ / 10000, version_ / 100 % 100, version_ % 100); }
  void start_reduce(std::span<const Piece> pieces) override;
  void start_gather(std::span<const Piece> pieces) override;
  void finish() override { device_.wait(Queue::compute, device_.record(Queue::comm)); }
  void sum_in_group(const Tensor& t) override;
  void sum(std::span<double> values) override {
    look();
    mesh_.sum("sum", values);
  }
  std::vector<std::string> gather(const std::string& text) override {
    look();
    return mesh_.gather("texts", text);
  }
  void abort(const std::string& reason) noexcept override {
    mesh_.abort(reason);
    end(reason);
  }

 private:
  void join(int64_t comm, int64_t ranks, int64_t rank, const NcclId& id);
  void settle(int result, void* comm, const char* what);
  template <typename Calls>
  void grouped(int64_t which, const char* what, const Calls& calls);
  void enter() { device_.wait(Queue::comm, device_.record(Queue::compute)); }
  void leave();
  bool pending() const;  // a collective that was enqueued has not happened
  bool overdue() const;
  std::string async_error(bool overdue) const;
  void look();
  void watch();
  void watch_once();
  void end(const std::string& reason) noexcept;

  const Nccl& nccl_;
  CudaDevice& device_;
  net::Mesh& mesh_;
  int64_t group_;
  int version_ = 0;
  void* comms_[2] = {};  // null after abort
  void* event_ = nullptr;  // after the last collective
  std::atomic<double> enqueued_s_{0};
  mutable std::mutex mutex_;  // comms_ and ended_
  std::string ended_;         // why
  std::function<void(const std::function<void()>&)> around_watchdog_;
  std::condition_variable wake_;
  bool closing_ = false;
  std::thread watchdog_;
};

NcclCollectives::NcclCollectives(CudaDevice& device, net::Mesh& mesh, const NcclOptions& options, const Nccl& nccl)
    : nccl_(nccl), device_(device), mesh_(mesh), group_(options.collectives.group), around_watchdog_(options.around_watchdog) {
  DS_ASSERT(group_ >= 1 && size() % group_ == 0, "{} ranks in groups of {}", size(), group_);
  ::setenv("NCCL_ALGO", "Ring", 0);
  settle(nccl_.ncclGetVersion(&version_), nullptr, "ask for its version");
  DS_REQUIRE(version_ >= kNcclVersion, "{}: it is version {}.{}.{}, too old; wanted: {}", kNcclFile, version_ / 10000, version_ / 100 % 100, version_ % 100, kNcclWanted);
  double versions[2] = {static_cast<double>(version_), 0};  // sum; all alike
  mesh_.sum("nccl version", versions);
  DS_REQUIRE(versions[0] == static_cast<double>(version_) * static_cast<double>(size()), "the ranks have different versions of NCCL; rank {} has {}.{}.{}", rank(), version_ / 10000,
             version_ / 100 % 100, version_ % 100);
  // Rank 0 names all communicators: a group's each, then a place's each.
  const int64_t groups = size() / group_;
  std::string ids(static_cast<size_t>(groups + (groups > 1 ? group_ : 0)) * sizeof(NcclId), '\0');
  for (size_t i = 0; i < ids.size() / sizeof(NcclId) && rank() == 0; ++i) {
    NcclId id;
    settle(nccl_.ncclGetUniqueId(&id), nullptr, "name a group of ranks");
    ids.replace(i * sizeof id, sizeof id, id.bytes, sizeof id);
  }
  ids = mesh_.broadcast("nccl ids", ids);
  const auto id = [&](int64_t i) {
    NcclId one;
    ids.copy(one.bytes, sizeof one, static_cast<size_t>(i) * sizeof one);
    return one;
  };
  const Driver& driver = device_.driver();
  check(driver, driver.cuEventCreate(&event_, kEventDisableTiming), "make an event");
  device_.set_watch([this] { look(); });
  try {
    join(0, group_, place(), id(rank() / group_));
    if (groups > 1) join(1, groups, rank() / group_, id(groups + place()));
    if (options.watchdog) watchdog_ = std::thread([this] { watch(); });
  } catch (const std::exception& e) {
    end(e.what());
    device_.set_watch({});
    driver.cuEventDestroy_v2(event_);
    throw;
  }
}

NcclCollectives::~NcclCollectives() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  device_.set_watch({});
  for (const double until = now_s() + kPatience; pending();) {
    if (now_s() > until) end("it left before a collective had happened");
    std::this_thread::yield();
  }
  const Driver& driver = device_.driver();
  for (void* comm : comms_)
    if (comm != nullptr) {
      // Without a communicator that all have finished with, destroying it would wait for the others.
      nccl_.ncclCommFinalize(comm);
      int state = kNcclInProgress;
      for (const double until = now_s() + kPatience; state == kNcclInProgress && now_s() < until;)
        if (nccl_.ncclCommGetAsyncError(comm, &state) != kNcclSuccess) break;
        else std::this_thread::yield();
      state == kNcclSuccess ? nccl_.ncclCommDestroy(comm) : nccl_.ncclCommAbort(comm);
    }
  driver.cuEventDestroy_v2(event_);
}

// Communicators do not block: a call that is under way is waited for here, with the others in sight.
void NcclCollectives::settle(int result, void* comm, const char* what) {
  for (const double since = now_s(); result == kNcclInProgress && comm != nullptr;) {
    const int asked = nccl_.ncclCommGetAsyncError(comm, &result);
    if (asked != kNcclSuccess) result = asked;
    if (result != kNcclInProgress) break;
    mesh_.check();
    DS_REQUIRE(now_s() - since < mesh_.deadline_s(), "NCCL: rank {} waited {:g} s to {}: another rank does not come", rank(), mesh_.deadline_s(), what);
    std::this_thread::yield();
  }
  if (result == kNcclSuccess) return;
  const char* detail = comm != nullptr ? nccl_.ncclGetLastError(comm) : nullptr;
  fail("NCCL: rank {} cannot {}: {} (error {}){}{}; NCCL_DEBUG=WARN says more", rank(), what, nccl_.ncclGetErrorString(result), result, detail != nullptr && *detail != 0 ? ": " : "",
       detail != nullptr ? detail : "");
}

void NcclCollectives::join(int64_t comm, int64_t ranks, int64_t rank, const NcclId& id) {
  NcclConfig config;
  const int result = nccl_.ncclCommInitRankConfig(&comms_[comm], static_cast<int>(ranks), id, static_cast<int>(rank), &config);
  settle(result, comms_[comm], "join its group of ranks");
}

// The watchdog keeps off a communicator while calls are made on it.
template <typename Calls>
void NcclCollectives::grouped(int64_t which, const char* what, const Calls& calls) {
  const std::lock_guard lock(mutex_);
  void* comm = comms_[which];
  DS_REQUIRE(comm != nullptr, "{}", ended_);
  settle(nccl_.ncclGroupStart(), nullptr, what);
  try {
    calls(comm, [&](int result) { settle(result == kNcclInProgress ? kNcclSuccess : result, comm, what); });
  } catch (...) {
    nccl_.ncclGroupEnd();  // a group left open would hold back the communicator's end
    throw;
  }
  settle(nccl_.ncclGroupEnd(), comm, what);
}

void NcclCollectives::leave() {
  const Driver& driver = device_.driver();
  check(driver, driver.cuEventRecord(event_, device_.stream(Queue::comm)), "record an event");
  enqueued_s_ = now_s();
}

namespace {
void* data(const Tensor& t) { return model::BackendAccess::raw(t.data); }
size_t count(const Tensor& t) {
  DS_ASSERT(t.stride == t.cols || t.rows <= 1, "a tensor between ranks has stride {} of {}", t.stride, t.cols);
  return static_cast<size_t>(t.size());
}
}  // namespace

void NcclCollectives::start_reduce(std::span<const Piece> pieces) {
  look();
  enter();
  const Stream stream = device_.stream(Queue::comm);
  grouped(0, "sum gradients", [&](void* comm, const auto& called) {
    for (const Piece& p : pieces)
      if (count(p.tensor) > 0) called(nccl_.ncclReduce(data(p.tensor), data(p.tensor), count(p.tensor), type_of(p.tensor.dtype), kNcclSum, static_cast<int>(p.owner), comm, stream));
  });
  if (size() > group_)
    grouped(1, "sum the groups' gradients", [&](void* comm, const auto& called) {
      for (const Piece& p : pieces)
        if (p.owner == place() && count(p.tensor) > 0)
          called(nccl_.ncclAllReduce(data(p.tensor), data(p.tensor), count(p.tensor), type_of(p.tensor.dtype), kNcclSum, comm, stream));
    });
  leave();
}

void NcclCollectives::start_gather(std::span<const Piece> pieces) {
  look();
  enter();
  const Stream stream = device_.stream(Queue::comm);
  grouped(0, "send weights", [&](void* comm, const auto& called) {
    for (const Piece& p : pieces)
      if (count(p.tensor) > 0) called(nccl_.ncclBroadcast(data(p.tensor), data(p.tensor), count(p.tensor), type_of(p.tensor.dtype), static_cast<int>(p.owner), comm, stream));
  });
  leave();
}

void NcclCollectives::sum_in_group(const Tensor& t) {
  look();
  enter();
  const Stream stream = device_.stream(Queue::comm);
  grouped(0, "share the gradients' norms", [&](void* comm, const auto& called) { called(nccl_.ncclAllReduce(data(t), data(t), count(t), type_of(t.dtype), kNcclSum, comm, stream)); });
  leave();
  finish();
}

// ---- looking around ----------------------------------------------------------------------------------------------------------

bool NcclCollectives::pending() const { return enqueued_s_ > 0 && device_.driver().cuEventQuery(event_) == kNotReady; }
bool NcclCollectives::overdue() const { return now_s() - enqueued_s_ > mesh_.deadline_s() && pending(); }

// With the lock held; `overdue` is asked for before, since the driver may be long in answering.
std::string NcclCollectives::async_error(bool overdue) const {
  for (void* comm : comms_) {
    if (comm == nullptr) continue;
    int error = kNcclSuccess;
    const int asked = nccl_.ncclCommGetAsyncError(comm, &error);
    if (asked != kNcclSuccess) error = asked;
    if (error != kNcclSuccess && error != kNcclInProgress) return fmt::format("NCCL: on rank {} a collective failed: {} (error {}); NCCL_DEBUG=WARN says more", rank(), nccl_.ncclGetErrorString(error), error);
  }
  if (overdue) return fmt::format("NCCL: rank {} waited {:g} s for a collective on its GPU: another rank is stuck or cut off. The last checkpoint is whole", rank(), mesh_.deadline_s());
  return "";
}

// Throws when the run cannot go on; then nothing of NCCL's runs on this device any more.
void NcclCollectives::look() {
  std::string why;
  const bool late = overdue();
  {
    const std::lock_guard lock(mutex_);
    why = ended_;
    if (why.empty()) why = async_error(late);
  }
  if (why.empty()) {
    if (!pending()) return;  // then nobody is waited for, and whoever has finished may go
    try {
      mesh_.check();
      return;
    } catch (const std::exception& e) {
      why = e.what();
    }
  }
  end(why);
  fail("{}", why);
}

void NcclCollectives::end(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (ended_.empty()) ended_ = reason.empty() ? "the run was ended" : reason;
  for (void*& comm : comms_)
    if (comm != nullptr) nccl_.ncclCommAbort(comm), comm = nullptr;
}

void NcclCollectives::watch() {
  std::unique_lock lock(mutex_);
  while (!closing_ && ended_.empty()) {
    wake_.wait_for(lock, std::chrono::milliseconds(250));
    if (closing_ || !ended_.empty()) return;
    lock.unlock();
    if (around_watchdog_) around_watchdog_([this] { watch_once(); });
    else watch_once();
    lock.lock();
  }
}

void NcclCollectives::watch_once() {
  device_.driver().cuCtxSetCurrent(device_.context());
  const bool late = overdue();
  std::string why;
  {
    const std::lock_guard lock(mutex_);
    if (ended_.empty()) why = async_error(late);
  }
  if (!why.empty()) end(why);  // the host, which may be held up in the driver, then finds out why
}

}  // namespace

std::unique_ptr<model::Collectives> make_nccl_collectives(model::Context& ctx, net::Mesh& mesh, const NcclOptions& options, const Nccl& nccl) {
  return std::make_unique<NcclCollectives>(dynamic_cast<CudaDevice&>(ctx.device()), mesh, options, nccl);
}

}  // namespace dspark::cuda
