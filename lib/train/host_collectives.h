// Collectives by way of the host, on devices whose queues run inline (cpu, ref): pieces are downloaded, sent and uploaded in parts of a
// megabyte, by a thread of their own, in the order in which they were started. While it is at it the mesh is its alone: every other call
// waits for it first. What fails there is thrown by the next call.
//
// Every rank sends its share of a piece straight to the owner, who adds the ranks' parts in rank order (in fp64, rounded once), so that
// a rank moves (R-1)/R of all bytes in each direction, as a ring would. Several groups: each owner hears all ranks, not its group's only.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "model/collectives.h"
#include "net/mesh.h"

namespace dspark::train {

class HostCollectives final : public model::Collectives {
 public:
  // `mesh` outlives this.
  HostCollectives(model::Context& ctx, net::Mesh& mesh, const model::CollectiveOptions& options);
  ~HostCollectives() override;
  int64_t rank() const override { return mesh_.rank(); }
  int64_t size() const override { return mesh_.size(); }
  int64_t group() const override { return group_; }
  std::string describe() const override;
  void start_reduce(std::span<const Piece> pieces) override;
  void start_gather(std::span<const Piece> pieces) override;
  void finish() override;
  void sum_in_group(const model::Tensor& t) override;
  void sum(std::span<double> values) override {
    finish();
    mesh_.sum("sum", values);
  }
  std::vector<std::string> gather(const std::string& text) override {
    finish();
    return mesh_.gather("texts", text);
  }
  void abort(const std::string& reason) noexcept override;

 private:
  void start(std::function<void()> call);
  void work();
  void stop(double patience_s) noexcept;

  model::Context& ctx_;
  net::Mesh& mesh_;
  int64_t group_;
  std::mutex mutex_;  // of all below but thread_
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_;  // the first one is at work
  std::exception_ptr failed_;
  bool closing_ = false;
  std::thread thread_;  // begins with the first call
};

// The device's own, or by way of the host.
std::unique_ptr<model::Collectives> make_collectives(model::Context& ctx, net::Mesh& mesh, const model::CollectiveOptions& options);

}  // namespace dspark::train
