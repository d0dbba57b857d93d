#include "train/host_collectives.h"

#include <algorithm>

namespace dspark::train {

using namespace model;
using Piece = Collectives::Piece;

namespace {

constexpr int64_t kPartBytes = 1 << 20;
constexpr double kPatience = 2;  // seconds

// A walk over pieces in parts. Parts end with their piece, so that both ends of a connection cut alike.
class Parts {
 public:
  explicit Parts(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const Tensor& t : tensors_) bytes_ += t.size() * dtype_bytes(t.dtype);
    skip_empty();
  }
  int64_t bytes() const { return bytes_; }
  bool end() const { return at_ == tensors_.size(); }
  // The part at hand, [1, n].
  Tensor part() const {
    const Tensor& t = tensors_[at_];
    return t.reshaped(1, t.size()).col_range(offset_, std::min(t.size() - offset_, kPartBytes / dtype_bytes(t.dtype)));
  }
  void next() {
    offset_ += part().cols;
    if (offset_ == tensors_[at_].size()) ++at_, offset_ = 0;
    skip_empty();
  }

 private:
  void skip_empty() {
    while (at_ < tensors_.size() && tensors_[at_].size() == 0) ++at_;
  }
  std::vector<Tensor> tensors_;
  size_t at_ = 0;
  int64_t offset_ = 0, bytes_ = 0;
};

void download(Context& ctx, const HostMatrix& to, const Tensor& from) { ctx.device().synchronize(ctx.device().download(Queue::comm, to, from)); }
void upload(Context& ctx, const Tensor& to, const ConstHostMatrix& from) { ctx.device().synchronize(ctx.device().upload(Queue::comm, to, from)); }

HostMatrix host(std::vector<std::byte>& memory, const Tensor& part) {
  memory.resize(static_cast<size_t>(part.size() * dtype_bytes(part.dtype)));
  return {memory.data(), part.dtype, 1, part.cols, part.cols};
}
ConstHostMatrix read(const std::vector<std::byte>& memory, const Tensor& part) { return {memory.data(), part.dtype, 1, part.cols, part.cols}; }

template <typename T, typename ToDouble>
void add_as(std::vector<double>& sum, const std::vector<std::byte>& values, const ToDouble& to_double) {
  const auto* v = reinterpret_cast<const T*>(values.data());
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += to_double(v[i]);
}
void add(std::vector<double>& sum, const std::vector<std::byte>& values, DType dtype) {
  switch (dtype) {
    case DType::f64: return add_as<double>(sum, values, [](double v) { return v; });
    case DType::f32: return add_as<float>(sum, values, [](float v) { return static_cast<double>(v); });
    default: return add_as<bf16>(sum, values, [](bf16 v) { return static_cast<double>(to_float(v)); });
  }
}

// What a rank sends to and takes from each peer. Parts are downloaded as they go out.
class Traffic : public net::Exchange {
 public:
  explicit Traffic(Context& ctx, int64_t ranks)
      : ctx_(ctx), sent_(static_cast<size_t>(ranks)), taken_(static_cast<size_t>(ranks)), parts_out_(static_cast<size_t>(ranks), 0) {
    for (int64_t r = 0; r < ranks; ++r) out_.emplace_back(std::vector<Tensor>{}), in_bytes_.push_back(0);
  }
  int64_t out_bytes(int64_t peer) const override { return out_[static_cast<size_t>(peer)].bytes(); }
  int64_t in_bytes(int64_t peer) const override { return in_bytes_[static_cast<size_t>(peer)]; }
  std::span<const std::byte> next_out(int64_t peer) override {
    Parts& parts = out_[static_cast<size_t>(peer)];
    auto& memory = sent_[static_cast<size_t>(peer)];
    const Tensor part = parts.part();
    download(ctx_, host(memory, part), part);
    parts.next();
    ++parts_out_[static_cast<size_t>(peer)];
    return memory;
  }

 protected:
  Context& ctx_;
  std::vector<Parts> out_;
  std::vector<int64_t> in_bytes_;
  std::vector<std::vector<std::byte>> sent_, taken_;
  std::vector<int64_t> parts_out_;  // to each peer; what was downloaded may be overwritten
};

// Adds the parts of all ranks, this one's own among them, in rank order.
class Adding final : public Traffic {
 public:
  // `mine` comes from every rank; to[rank] is sent there, which is `mine` to the same place in another group.
  Adding(Context& ctx, int64_t rank, int64_t ranks, int64_t group, std::vector<Tensor> mine, std::vector<std::vector<Tensor>> to)
      : Traffic(ctx, ranks), rank_(rank), group_(group), mine_(std::move(mine)), full_(static_cast<size_t>(ranks), false) {
    for (size_t r = 0; r < to.size(); ++r) out_[r] = Parts(std::move(to[r]));
    for (int64_t r = 0; r < ranks; ++r)
      if (r != rank_) in_bytes_[static_cast<size_t>(r)] = mine_.bytes();
    full_[static_cast<size_t>(rank_)] = true;
  }
  std::span<std::byte> next_in(int64_t peer) override {
    if (full_[static_cast<size_t>(peer)]) return {};
    auto& memory = taken_[static_cast<size_t>(peer)];
    (void)host(memory, mine_.part());
    return memory;
  }
  void came(int64_t peer) override {
    full_[static_cast<size_t>(peer)] = true;
    add_when_ready();
  }
  std::span<const std::byte> next_out(int64_t peer) override {
    const auto part = Traffic::next_out(peer);
    add_when_ready();
    return part;
  }

 private:
  void add_when_ready() {
    if (mine_.end() || std::find(full_.begin(), full_.end(), false) != full_.end()) return;
    for (auto r = static_cast<size_t>(rank_ % group_); r < parts_out_.size(); r += static_cast<size_t>(group_))
      if (static_cast<int64_t>(r) != rank_ && parts_out_[r] <= added_) return;  // the sum may not take the place of what goes there
    const Tensor part = mine_.part();
    auto& own = taken_[static_cast<size_t>(rank_)];
    download(ctx_, host(own, part), part);
    sum_.assign(static_cast<size_t>(part.cols), 0.0);
    for (const auto& values : taken_) add(sum_, values, part.dtype);
    upload(ctx_, part, {sum_.data(), DType::f64, 1, part.cols, part.cols});
    mine_.next();
    ++added_;
    std::fill(full_.begin(), full_.end(), false);
    full_[static_cast<size_t>(rank_)] = true;
  }

  int64_t rank_, group_;
  Parts mine_;
  int64_t added_ = 0;       // parts of it
  std::vector<bool> full_;  // whose part is here
  std::vector<double> sum_;
};

class Taking final : public Traffic {
 public:
  // `of[place]`: the pieces whose owner that place is; a rank speaks with its own group.
  Taking(Context& ctx, int64_t rank, int64_t ranks, int64_t group, const std::vector<std::vector<Tensor>>& of) : Traffic(ctx, ranks) {
    for (int64_t r = 0; r < ranks; ++r) {
      const bool near = r / group == rank / group && r != rank;
      in_.emplace_back(near ? of[static_cast<size_t>(r % group)] : std::vector<Tensor>{});
      in_bytes_[static_cast<size_t>(r)] = in_.back().bytes();
      if (near) out_[static_cast<size_t>(r)] = Parts(of[static_cast<size_t>(rank % group)]);
    }
  }
  std::span<std::byte> next_in(int64_t peer) override {
    auto& memory = taken_[static_cast<size_t>(peer)];
    (void)host(memory, in_[static_cast<size_t>(peer)].part());
    return memory;
  }
  void came(int64_t peer) override {
    Parts& parts = in_[static_cast<size_t>(peer)];
    const Tensor part = parts.part();
    upload(ctx_, part, read(taken_[static_cast<size_t>(peer)], part));
    parts.next();
  }

 private:
  std::vector<Parts> in_;
};

std::vector<std::vector<Tensor>> by_owner(std::span<const Piece> pieces, int64_t group) {
  std::vector<std::vector<Tensor>> of(static_cast<size_t>(group));
  for (const Piece& p : pieces) {
    DS_ASSERT(p.owner >= 0 && p.owner < group && (p.tensor.stride == p.tensor.cols || p.tensor.rows <= 1), "a piece of place {} of {}, stride {} of {}", p.owner, group,
              p.tensor.stride, p.tensor.cols);
    of[static_cast<size_t>(p.owner)].push_back(p.tensor);
  }
  return of;
}

}  // namespace

HostCollectives::HostCollectives(Context& ctx, net::Mesh& mesh, const CollectiveOptions& options) : ctx_(ctx), mesh_(mesh), group_(options.group) {
  DS_ASSERT(group_ >= 1 && mesh.size() % group_ == 0, "{} ranks in groups of {}", mesh.size(), group_);
}

std::string HostCollectives::describe() const { return fmt::format("{} ranks by way of the host", size()); }

HostCollectives::~HostCollectives() { stop(0); }

void HostCollectives::start_reduce(std::span<const Piece> pieces) {
  const auto of = by_owner(pieces, group_);
  std::vector<std::vector<Tensor>> to(static_cast<size_t>(size()));
  for (int64_t r = 0; r < size(); ++r)
    if (r != rank()) to[static_cast<size_t>(r)] = of[static_cast<size_t>(r % group_)];
  start([this, mine = of[static_cast<size_t>(place())], to = std::move(to)] {
    Adding traffic(ctx_, rank(), size(), group_, mine, to);
    mesh_.exchange("reduce", traffic);
  });
}

void HostCollectives::start_gather(std::span<const Piece> pieces) {
  start([this, of = by_owner(pieces, group_)] {
    Taking traffic(ctx_, rank(), size(), group_, of);
    mesh_.exchange("gather", traffic);
  });
}

void HostCollectives::start(std::function<void()> call) {
  const std::lock_guard lock(mutex_);
  if (closing_ || failed_) return;  // the run ends with the reason that abort() was given, or with what finish() throws
  calls_.push_back(std::move(call));
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  changed_.notify_all();
}

void HostCollectives::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || !calls_.empty(); });
    if (calls_.empty() || failed_) return;
    const std::function<void()> call = calls_.front();
    lock.unlock();
    std::exception_ptr failed;
    try {
      call();
    } catch (...) {
      failed = std::current_exception();
    }
    lock.lock();
    calls_.pop_front();
    if (failed) failed_ = failed, calls_.clear();
    changed_.notify_all();
  }
}

void HostCollectives::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return calls_.empty() || failed_; });
  if (failed_) std::rethrow_exception(failed_);
}

// The thread gets a little time for the call it is at: in the middle of it no reason can be told.
void HostCollectives::stop(double patience_s) noexcept {
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    if (calls_.size() > 1) calls_.erase(calls_.begin() + 1, calls_.end());
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::duration<double>(patience_s), [&] { return calls_.empty(); });
    if (!calls_.empty()) mesh_.interrupt();
  }
  if (thread_.joinable()) thread_.join();
}

void HostCollectives::abort(const std::string& reason) noexcept {
  stop(kPatience);
  mesh_.abort(reason);
}

// All groups' sums are the same: the first one's are taken.
void HostCollectives::sum_in_group(const Tensor& t) {
  finish();
  std::vector<double> values(static_cast<size_t>(t.size()), 0);
  const HostMatrix matrix{values.data(), DType::f64, t.rows, t.cols, t.cols};
  if (rank() < group_) download(ctx_, matrix, t);
  mesh_.sum("sum in group", values);
  upload(ctx_, t, {values.data(), DType::f64, t.rows, t.cols, t.cols});
}

std::unique_ptr<Collectives> make_collectives(Context& ctx, net::Mesh& mesh, const CollectiveOptions& options) {
  if (const CollectivesFactory make = collectives_of(ctx.device().name())) return make(ctx, mesh, options);
  return std::make_unique<HostCollectives>(ctx, mesh, options);
}

}  // namespace dspark::train
