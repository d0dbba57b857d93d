// Collectives: what data-parallel ranks do together. One object a rank; all ranks make the same calls in the same order with pieces of
// the same shapes, whatever their data: which calls a step makes is known from its plan, and ranks without rows bring zeros.
//
// Ranks are dealt into shard groups of group() neighbours. A group holds every owned tensor once: the owner of a piece is a place in a
// group, and every group has one at that place. With one group (up to 16 ranks) a place is a rank.
//
// Calls with tensors take what the compute queue was given before them; they may only enqueue. What compute is given after them sees
// their results, but for start_reduce and start_gather: these go on beside it (on the communication queue, or a thread), in the order in
// which they were started, and their pieces are left alone until finish(). Calls with host values wait. Sums are in a fixed order: two runs give the same bits, and all ranks get the same ones.
// A rank that fails, dies or stays away longer than the deadline is an Error on all others that says which rank and why.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/context.h"

namespace dspark::net {
class Mesh;
}

namespace dspark::model {

class Collectives {
 public:
  // A contiguous float matrix on this rank's device.
  struct Piece {
    Tensor tensor;
    int64_t owner = 0;  // place in a shard group
  };
  virtual ~Collectives() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  virtual int64_t group() const = 0;  // ranks of a shard group
  int64_t place() const { return rank() % group(); }
  virtual std::string describe() const = 0;  // "NCCL 2.27.3", for logs

  // At each owner the piece becomes its sum over all ranks; elsewhere it is left undefined.
  virtual void start_reduce(std::span<const Piece> pieces) = 0;
  // Everywhere the piece becomes what its owner has.
  virtual void start_gather(std::span<const Piece> pieces) = 0;
  // What compute is given from here on sees the results of all that was started.
  virtual void finish() = 0;
  void reduce_to_owners(std::span<const Piece> pieces) { start_reduce(pieces), finish(); }
  void gather_from_owners(std::span<const Piece> pieces) { start_gather(pieces), finish(); }
  // A small tensor becomes its sum over the ranks of a shard group; every group has the same sum.
  virtual void sum_in_group(const Tensor& t) = 0;

  // Over all ranks.
  virtual void sum(std::span<double> values) = 0;
  // Rank 0 gets the texts of all, in rank order; the others an empty list.
  virtual std::vector<std::string> gather(const std::string& text) = 0;
  void barrier() {
    double nothing = 0;
    sum({&nothing, 1});
  }
  // Tells the other ranks why this one ends. Does not throw.
  virtual void abort(const std::string& reason) noexcept = 0;
};

// Of a run on one rank: nothing to do.
Collectives& one_rank();

// What ranks are told when they meet.
struct CollectiveOptions {
  int64_t group = 1;  // ranks of a shard group; divides the number of ranks
};
// Backends that exchange tensors by themselves put themselves here before main, under the first part of their device's name ("cuda").
// The mesh outlives what is made on it and may be used by it at any time.
using CollectivesFactory = std::unique_ptr<Collectives> (*)(Context& ctx, net::Mesh& mesh, const CollectiveOptions& options);
struct RegisteredCollectives {
  RegisteredCollectives(const std::string& device, CollectivesFactory make);
};
// Null when the device has none of its own.
CollectivesFactory collectives_of(const std::string& device);

}  // namespace dspark::model
