// AdamW, or Muon with AdamW for what is not a plain matrix, over a drafter's trainable tensors, with clipping by the norm over
// all of them. All of a step's scalars live on the device; a step whose gradients are not finite changes nothing.
//
// Of several ranks (ZeRO-1) each keeps and updates the tensors it owns: gradients are summed at their owners, the squares of all of
// them are shared, and the new weights come back from their owners. Both ways a bucket at a time (model/drafter.h): gradients while the
// backward makes the next one's, weights while the next one's are updated.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/drafter.h"
#include "model/readback.h"
#include "train/shards.h"

namespace dspark::train {

struct OptimizerOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;  // AdamW's
  double clip = 1.0;           // maximal norm; 0: none
  bool muon = false;           // matrices by Muon (`takes_muon`), the rest by AdamW
  double muon_momentum = 0.95, muon_weight_decay = 0.0;
  double muon_lr_factor = 1;   // times the step's learning rate
};

// One tensor's optimizer state, [rows, cols] acc, under the parameter's name. Muon keeps m only (its momentum buffer); of a tensor
// that another rank owns there is neither.
struct OptimizerState {
  std::string name;
  model::Tensor m, v;
  bool muon = false;
};

// Matrices with both sides > 1, but the embeddings, heads and Markov factors (DESIGN 4).
bool takes_muon(const model::Parameter& p);

class Optimizer {
 public:
  // The drafter was made with the same sharing's `owns`.
  Optimizer(model::Drafter& drafter, const OptimizerOptions& options, const Sharing& sharing = {});
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  struct Result {
    double grad_norm = 0;
    bool applied = true;  // false: the gradient was not finite, nothing changed
  };
  // Enqueues one step with `lr` (gradients are multiplied by grad_scale first), a refresh of the drafter's weights and the
  // way back of its scalars; result() of them says what happened. All ranks together.
  void enqueue(double lr, double grad_scale, model::Readback& scalars);
  static Result result(model::Readback& scalars);
  Result step(double lr, double grad_scale);  // and waits for it

  // The gradients of this bucket are final: they leave for their owners. Each once a step, in ascending order; enqueue() sends those
  // that have not left.
  void share_gradients(int64_t bucket);
  // A rank that had no row in a step takes part with these.
  void zero_gradients();
  // Everywhere the weights become their owners'. All ranks together; the drafter's refresh follows.
  void gather_weights();

  // One state's part of a step, its norm and its update: a rank's work is the sum of its own. enqueue() does all of them.
  void enqueue_norm(size_t state);
  void enqueue_update(size_t state);

  // Steps applied so far, counted on the device; part of a checkpoint. Both wait.
  int64_t steps() const;
  void set_steps(int64_t n);
  std::vector<OptimizerState>& states() { return states_; }
  const Sharing& sharing() const { return sharing_; }

 private:
  // A tensor as it travels: itself, or a contiguous copy of the wire's dtype.
  struct Wire {
    model::Tensor tensor, copy;
    bool owned = false;
  };
  struct Bucket {
    std::vector<Wire> gradients, weights;
    std::vector<model::Collectives::Piece> gradient_pieces, weight_pieces;
    std::vector<size_t> states;
  };
  model::Collectives::Piece add_wire(std::vector<Wire>& wires, const model::Parameter& p, const model::Tensor& t, DType dtype);
  void finish_gradients();
  void send_weights(const Bucket& bucket);
  void finish_weights();

  model::Drafter& drafter_;
  model::Context& ctx_;
  OptimizerOptions options_;
  Sharing sharing_;
  std::vector<OptimizerState> states_;
  std::vector<size_t> parameter_;  // index into drafter.parameters() of each state
  model::Tensor scalars_, sums_, work_;
  std::vector<Bucket> buckets_;
  int64_t shared_ = 0;  // buckets of the step at hand whose gradients have left
  double host_[2][model::kNumHostScalars] = {};  // of the last two steps: an upload may still be reading
  int64_t enqueued_ = 0;
};

}  // namespace dspark::train
