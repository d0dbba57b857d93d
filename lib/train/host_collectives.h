// Collectives by way of the host, on any device: pieces are downloaded, sent and uploaded in parts of a megabyte.
//
// Every rank sends its share of a piece straight to the owner, who adds the ranks' parts in rank order (in fp64, rounded once), so that
// a rank moves (R-1)/R of all bytes in each direction, as a ring would. Several groups: each owner hears all ranks, not its group's only.
#pragma once

#include "model/collectives.h"
#include "net/mesh.h"

namespace dspark::train {

class HostCollectives final : public model::Collectives {
 public:
  // `mesh` outlives this.
  HostCollectives(model::Context& ctx, net::Mesh& mesh, const model::CollectiveOptions& options);
  int64_t rank() const override { return mesh_.rank(); }
  int64_t size() const override { return mesh_.size(); }
  int64_t group() const override { return group_; }
  std::string describe() const override;
  void reduce_to_owners(std::span<const Piece> pieces) override;
  void gather_from_owners(std::span<const Piece> pieces) override;
  void sum_in_group(const model::Tensor& t) override;
  void sum(std::span<double> values) override { mesh_.sum("sum", values); }
  std::vector<std::string> gather(const std::string& text) override { return mesh_.gather("texts", text); }
  void abort(const std::string& reason) noexcept override { mesh_.abort(reason); }

 private:
  model::Context& ctx_;
  net::Mesh& mesh_;
  int64_t group_;
};

// The device's own, or by way of the host.
std::unique_ptr<model::Collectives> make_collectives(model::Context& ctx, net::Mesh& mesh, const model::CollectiveOptions& options);

}  // namespace dspark::train
