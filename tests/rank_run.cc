#include "rank_run.h"

#include <sys/socket.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/hash.h"
#include "job/gemm_choices.h"
#include "train/host_collectives.h"
#include "train/init.h"
#include "train/plan_step.h"

namespace ranks {

using namespace dspark::model;
using namespace dspark::train;

std::vector<std::unique_ptr<net::Mesh>> local_meshes(int64_t ranks, double deadline_s) {
  const auto n = static_cast<size_t>(ranks);
  std::vector<std::vector<int>> sockets(n, std::vector<int>(n, -1));
  for (size_t a = 0; a < n; ++a)
    for (size_t b = a + 1; b < n; ++b) {
      int pair[2];
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
      sockets[a][b] = pair[0], sockets[b][a] = pair[1];
    }
  std::vector<std::unique_ptr<net::Mesh>> meshes;
  for (size_t r = 0; r < n; ++r) meshes.push_back(std::make_unique<net::Mesh>(static_cast<int64_t>(r), sockets[r], deadline_s));
  return meshes;
}

namespace {

constexpr int64_t kWidth = 8, kVocab = 24;

DrafterConfig tiny_config(bool own_width) {
  DrafterConfig c;
  c.hidden = own_width ? 12 : kWidth, c.target_hidden = kWidth;
  c.ffn = 12, c.heads = 2, c.kv_heads = 1, c.head_dim = 4;
  c.vocab = c.draft_vocab = kVocab;
  c.layers = {LayerType::full};
  c.taps = {{1}, {2}};
  c.block = 3, c.rank = 4;
  c.mask_token = kVocab - 1;
  c.max_position = 64;
  return c;
}

std::vector<float> random_values(const std::string& name, int64_t n) {
  const Rng rng(5, RngStream::test, crc32c(std::as_bytes(std::span(name))));
  std::vector<float> v(static_cast<size_t>(n));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(0.5 * rng.normal(i));
  return v;
}

// Freed when a run ends, well or not.
struct Freed {
  Context& ctx;
  TargetHead head{};
  ~Freed() {
    for (const Tensor& t : {head.head.value, head.norm})
      if (t) ctx.free(t);
  }
};

}  // namespace

TinyRuns::TinyRuns(int64_t documents) {
  formats::StoreIdentity id = store_samples::small_identity(formats::StoreCodec::raw);
  id.taps = {1, 2}, id.hidden_size = kWidth, id.vocab_size = kVocab;
  formats::StoreWriter writer(at("store"), id);
  for (int64_t i = 0; i < documents; ++i) {
    store_samples::Sample s = store_samples::make_sample(0x100 + static_cast<uint64_t>(i), 5 + 3 * i % 8, id.row_width());
    for (int32_t& token : s.ids) token %= kVocab - 1;
    std::fill(s.mask.begin() + 1, s.mask.end(), uint8_t{1});
    REQUIRE(writer.append(formats::encode_record(writer.format(), s.view())));
  }
  writer.finish();
}

Outcome TinyRuns::run(const RunOptions& o, net::Mesh* mesh) const {
  Outcome outcome;
  std::unique_lock<std::mutex> at_work;
  if (o.machine != nullptr) {
    at_work = std::unique_lock(*o.machine);
    if (mesh != nullptr)
      mesh->around_wait = [&](const std::function<void()>& wait) {
        at_work.unlock();
        wait();
        at_work.lock();
      };
  }
  try {
    const auto backend = make_backend(o.backend);
    Context& ctx = backend->context();
    std::vector<std::unique_ptr<formats::SampleSource>> sources;
    sources.push_back(formats::open_store(at("store")));
    const Dataset data(std::move(sources), o.val_fraction, 3);
    const DrafterConfig config = tiny_config(o.own_width);

    OptimizerOptions optimizer;
    optimizer.muon = o.muon, optimizer.weight_decay = 0.1, optimizer.muon_weight_decay = 0.05, optimizer.clip = 0.5;
    Sharing sharing;
    std::unique_ptr<Collectives> collectives;
    if (mesh != nullptr) {
      const CollectiveOptions group{o.group > 0 ? o.group : mesh->size()};
      collectives = o.collectives ? o.collectives(ctx, *mesh, group) : make_collectives(ctx, *mesh, group);
      sharing = {collectives.get(), plan_owners(config, o.backend.precision, optimizer, collectives->group()), o.bf16_wire};
    }
    Drafter drafter(ctx, config, {.train_embeddings = config.own_embeddings(), .owns = [&](const std::string& name) { return sharing.owns(name); }});
    const auto target_values = [&](const std::string& name) { return random_values(name, kVocab * kWidth); };
    init_random(drafter, target_values, 7);
    Freed freed{ctx};
    TargetHead& target = freed.head;
    const auto head = target_values("lm_head.weight");
    target.head.value = ctx.allocate(ctx.act_dtype(), kVocab, kWidth);
    ctx.upload_now(target.head.value, {head.data(), DType::f32, kVocab, kWidth, kWidth});
    refresh(ctx, {&target.head});
    target.norm = ctx.allocate(ctx.acc_dtype(), 1, kWidth);
    fill(ctx, {target.norm, 1});

    TrainerOptions t;
    t.out = at(o.out), t.steps = o.steps, t.batch_docs = o.batch_docs, t.save_every = o.save_every, t.validate_every = o.validate_every, t.keep = 9, t.time_limit_s = o.time_limit_s;
    t.pack.row_tokens = o.row_tokens, t.pack.anchors = 3, t.pack.chunk_slots = 4;
    t.schedule.kind = Schedule::Kind::constant, t.schedule.lr = 1e-2;
    t.config = [] { return std::string("{}"); };
    t.sharing = sharing;
    t.on_step = [&](const StepRecord& r) {
      if (r.phase == "train") outcome.steps.push_back({r.loss, r.grad_norm, r.metrics.tau(), r.metrics.slots, static_cast<double>(r.tokens)});
      else outcome.validation.insert(outcome.validation.end(), {r.metrics.tau(), r.loss});
      if (o.on_step) o.on_step(r);
    };
    Objective objective = deepspec_objective(true);
    objective.denominator = o.denominator;
    {
      Trainer trainer(drafter, target, data, {&config, {}, {0, 1, 2}}, objective, optimizer, t);
      if (const auto found = newest_checkpoint(t.out, *sharing.ranks)) trainer.resume(*found);
      else if (o.choose_kernels) job::choose_kernels(*backend, *sharing.ranks, [&] { trainer.rehearse(); });
      outcome.result = trainer.run();
    }
    for (const Parameter& p : drafter.parameters()) {
      if (!p.trainable) continue;
      auto& values = outcome.weights[p.name];
      values.resize(static_cast<size_t>(p.value.size()));
      ctx.download_now({values.data(), DType::f64, p.value.rows, p.value.cols, p.value.cols}, p.value);
      outcome.owned += p.owned ? 1 : 0;
      if (p.cast_on_update()) outcome.state_elements += p.master.size();
    }
  } catch (const std::exception& e) {
    outcome.error = e.what();
    if (mesh != nullptr) mesh->abort(e.what());
  }
  if (mesh != nullptr) mesh->around_wait = {};
  return outcome;
}

std::vector<Outcome> TinyRuns::run(const RunOptions& o, int64_t ranks, double deadline_s, const std::function<void(int64_t, RunOptions&)>& change) const {
  auto meshes = local_meshes(ranks, deadline_s);
  std::vector<Outcome> outcomes(meshes.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < meshes.size(); ++r)
    threads.emplace_back([&, r] {
      RunOptions own = o;
      change(static_cast<int64_t>(r), own);
      outcomes[r] = run(own, meshes[r].get());
    });
  for (auto& t : threads) t.join();
  return outcomes;
}

std::vector<Outcome> TinyRuns::run(const RunOptions& o, int64_t ranks, double deadline_s) const {
  if (ranks == 1) return {run(o, nullptr)};
  return run(o, ranks, deadline_s, [](int64_t, RunOptions&) {});
}

namespace {

class AllAtTheEnd final : public Collectives {
 public:
  AllAtTheEnd(Context& ctx, std::unique_ptr<Collectives> inner, bool beside_the_backward) : ctx_(ctx), inner_(std::move(inner)), beside_(beside_the_backward) {}
  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  int64_t group() const override { return inner_->group(); }
  std::string describe() const override { return inner_->describe(); }
  void start_reduce(std::span<const Piece> pieces) override {
    if (gradients_.pieces.empty()) at_first_ = values_of(last_bucket_);
    last_bucket_.assign(pieces.begin(), pieces.end());
    gradients_.add(*this, pieces);
  }
  void start_gather(std::span<const Piece> pieces) override { weights_.add(*this, pieces); }
  void finish() override {
    if (!gradients_.pieces.empty()) {
      check_same(gradients_);
      if (beside_ && !at_first_.empty() && at_first_ == values_of(last_bucket_)) fail("all gradients were there when the first ones left");
      inner_->reduce_to_owners(gradients_.pieces);
    }
    if (!weights_.pieces.empty()) inner_->gather_from_owners(weights_.pieces);
    gradients_ = {}, weights_ = {};
  }
  void sum_in_group(const Tensor& t) override { inner_->sum_in_group(t); }
  void sum(std::span<double> values) override { inner_->sum(values); }
  std::vector<std::string> gather(const std::string& text) override { return inner_->gather(text); }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }

 private:
  using Values = std::vector<std::vector<double>>;
  struct Started {
    std::vector<Piece> pieces;
    Values values;
    void add(AllAtTheEnd& of, std::span<const Piece> more) {
      pieces.insert(pieces.end(), more.begin(), more.end());
      for (auto& v : of.values_of(more)) values.push_back(std::move(v));
    }
  };
  Values values_of(std::span<const Piece> pieces) {
    Values all;
    for (const Piece& p : pieces) {
      all.emplace_back(static_cast<size_t>(p.tensor.size()));
      ctx_.download_now({all.back().data(), DType::f64, p.tensor.rows, p.tensor.cols, p.tensor.cols}, p.tensor);
    }
    return all;
  }
  void check_same(const Started& started) {
    if (values_of(started.pieces) != started.values) fail("gradients changed after they had left");
  }

  Context& ctx_;
  std::unique_ptr<Collectives> inner_;
  bool beside_;
  Started gradients_, weights_;
  std::vector<Piece> last_bucket_;  // of the step before
  Values at_first_;                 // what was in its tensors when the first bucket left
};

}  // namespace

std::unique_ptr<Collectives> all_at_the_end(Context& ctx, std::unique_ptr<Collectives> inner, bool beside_the_backward) {
  return std::make_unique<AllAtTheEnd>(ctx, std::move(inner), beside_the_backward);
}

double difference(const Outcome& a, const Outcome& b) {
  double worst = a.steps.size() == b.steps.size() && a.weights.size() == b.weights.size() && !a.weights.empty() ? 0 : INFINITY;
  const auto compare = [&](double x, double y) {
    worst = std::isfinite(x) && std::isfinite(y) ? std::max(worst, std::abs(x - y) / std::max(1.0, std::abs(y))) : INFINITY;
  };
  for (size_t i = 0; i < std::min(a.steps.size(), b.steps.size()); ++i)
    for (size_t k = 0; k < a.steps[i].size(); ++k) compare(a.steps[i][k], b.steps[i][k]);
  for (const auto& [name, values] : a.weights) {
    const auto it = b.weights.find(name);
    if (it == b.weights.end() || it->second.size() != values.size()) return INFINITY;
    for (size_t i = 0; i < values.size(); ++i) compare(values[i], it->second[i]);
  }
  return worst;
}

}  // namespace ranks
