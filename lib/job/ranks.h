// This process's part in a training run of several: which rank it is, how it meets the others, and what it tells them when it fails.
//
//   RankSession session(options.ranks);     // from the environment; alone unless that says otherwise
//   if (session.launches()) ...             // launch.h starts the ranks that were asked for
//   session.meet(options.common, timeout);  // waits for the others; which device and how many threads are this rank's
//   const auto ranks = session.join(ctx);   // how tensors go between them; null when alone
#pragma once

#include <memory>

#include "job/common.h"
#include "model/collectives.h"
#include "net/rendezvous.h"

namespace dspark::job {

class RankSession {
 public:
  // `asked`: --ranks; 1 when it was not given.
  explicit RankSession(int64_t asked) : asked_(asked), place_(net::place_from_environment(asked > 1)) {}
  const net::Place& place() const { return place_; }
  bool several() const { return place_.size > 1; }
  bool first() const { return place_.rank == 0; }  // which writes everything but its share of checkpoints
  // Several ranks were asked for, and this is none of them.
  bool launches() const { return asked_ > 1 && !several(); }
  // `timeout_s`: how long any wait for the others may last. A rank that is not the first speaks of warnings and errors only, from here
  // on. Throws (exit 2) when the environment says another number of ranks than was asked for.
  void meet(CommonOptions& common, double timeout_s);
  std::unique_ptr<model::Collectives> join(model::Context& ctx);
  void abort(const std::string& reason) noexcept;

 private:
  int64_t asked_;
  net::Place place_;
  std::unique_ptr<net::Mesh> mesh_;
};

}  // namespace dspark::job
