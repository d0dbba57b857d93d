// A tiny training run on one rank, and several of them as threads over socket pairs.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "net/mesh.h"
#include "store_samples.h"
#include "train/trainer.h"

namespace ranks {

using namespace dspark;

// Meshes of one run on this machine.
std::vector<std::unique_ptr<net::Mesh>> local_meshes(int64_t ranks, double deadline_s);

struct RunOptions {
  model::BackendOptions backend{.device = "ref", .precision = model::Precision::fp64};
  int64_t steps = 5, batch_docs = 5, row_tokens = 16, save_every = 0, validate_every = 0;
  double val_fraction = 0, time_limit_s = 0;
  bool muon = false, own_width = false, bf16_wire = false, choose_kernels = false;
  int64_t group = 0;  // ranks of a shard group; 0: all
  train::Denominator denominator = train::Denominator::pooled;
  std::function<void(const train::StepRecord&)> on_step;  // rank 0's
  std::string out = "out";  // in the run's folder
  std::function<std::unique_ptr<model::Collectives>(model::Context&, net::Mesh&, const model::CollectiveOptions&)> collectives;  // empty: the usual ones
  std::mutex* machine = nullptr;  // of ranks that share an emulated machine: one at a time is at work
};

struct Outcome {
  std::vector<std::array<double, 5>> steps;  // loss, gradient norm, tau, slots, tokens; rank 0's
  std::vector<double> validation;            // tau and loss in turn
  std::map<std::string, std::vector<double>> weights;  // trainable tensors' values
  int64_t owned = 0, state_elements = 0;     // of this rank
  train::TrainerResult result;
  std::string error;
  bool operator==(const Outcome& o) const { return steps == o.steps && validation == o.validation && weights == o.weights; }
};

// Everything that was started goes out with finish(), as if nothing overlapped. What this finds wrong with what it was given is an Error:
// a piece that changed after it was started, or, with `beside_the_backward`, gradients that were all there when the first ones left.
std::unique_ptr<model::Collectives> all_at_the_end(model::Context& ctx, std::unique_ptr<model::Collectives> inner, bool beside_the_backward);

// A store of `documents` samples of 5 to 12 tokens, and runs on it.
class TinyRuns {
 public:
  explicit TinyRuns(int64_t documents = 12);
  fs::path at(const std::string& name) const { return folder_.path / name; }
  // One rank of a run; null: of one. An error is told to the others and kept.
  Outcome run(const RunOptions& o, net::Mesh* mesh) const;
  std::vector<Outcome> run(const RunOptions& o, int64_t ranks, double deadline_s = 600) const;
  // As above; rank r's options are changed by `change(r, options)`.
  std::vector<Outcome> run(const RunOptions& o, int64_t ranks, double deadline_s, const std::function<void(int64_t, RunOptions&)>& change) const;

 private:
  store_samples::TempFolder folder_;
};

// The largest difference of any weight, of any step's loss, norm and tau, relative to 1 or the value.
double difference(const Outcome& a, const Outcome& b);

}  // namespace ranks
