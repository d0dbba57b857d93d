// This process's part in a training run of several: which rank it is, how it meets the others, and what it tells them when it fails.
//
//   RankSession session;                    // from the environment; alone unless that says otherwise
//   session.meet(options.common);           // waits for the others; which device and how many threads are this rank's
//   const auto ranks = session.join(ctx);   // how tensors go between them; null when alone
#pragma once

#include <memory>

#include "job/common.h"
#include "model/collectives.h"
#include "net/rendezvous.h"

namespace dspark::job {

class RankSession {
 public:
  RankSession() : place_(net::place_from_environment()) {}
  const net::Place& place() const { return place_; }
  bool several() const { return place_.size > 1; }
  bool first() const { return place_.rank == 0; }  // which writes everything but its share of checkpoints
  // A rank that is not the first speaks of warnings and errors only, from here on.
  void meet(CommonOptions& common);
  std::unique_ptr<model::Collectives> join(model::Context& ctx);
  void abort(const std::string& reason) noexcept;

 private:
  net::Place place_;
  std::unique_ptr<net::Mesh> mesh_;
};

}  // namespace dspark::job
