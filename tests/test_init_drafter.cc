// A drafter that goes on from another one (--init), and one with a width of its own (--hidden): embeddings and head trained with it.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli_bench.h"
#include "core/error.h"
#include "core/files.h"
#include "core/rng.h"
#include "model/backends.h"
#include "model/drafter_files.h"
#include "train/init.h"
#include "train/step.h"

using namespace dspark;
using namespace dspark::model;

namespace {

// So small that no weight moves: what a run starts with.
const Bench::Arguments kStill = {"--lr", "1e-30"};

Bench::Arguments with(Bench::Arguments a, const Bench::Arguments& more) {
  a.insert(a.end(), more.begin(), more.end());
  return a;
}

std::vector<float> values(const fs::path& drafter, const std::string& name) { return formats::read_f32(read_drafter(drafter).tensors.get(name)); }

bool is_shared(const std::string& name) { return name == "embed_tokens.weight" || name == "lm_head.weight"; }

}  // namespace

TEST_CASE("a drafter goes on with a new target: its weights, the target's embeddings and head", "[init][cli]") {
  const Bench first;
  require_ok(dspark_run(first.train(first.make_store(), first.at("drafter"), 3, {"--draft-vocab", "0"})));
  require_ok(dspark_run({"pack", first.at("drafter"), "--to", "deepspec", "--target", first.target, "--out", first.at("deepspec")}));
  const Bench second(12, 12, {.seed = 2});  // the same shapes and tokens, other weights
  const auto store = second.make_store();
  const target::TargetFiles target(second.target);
  for (const std::string from : {"drafter", "deepspec"}) {
    INFO(from);
    const auto out = second.at(from);
    const Ran ran = dspark_run(second.train(store, out, 1, with(kStill, {"--init", first.at(from), "--draft-vocab", "0"})));
    require_ok(ran);
    CHECK(ran.said("its lm_head is not the target's") == (from == "deepspec"));
    const DrafterFiles old = read_drafter(first.at("drafter")), now = read_drafter(out);
    CHECK(now.config.target_name == "tiny.gguf");
    for (const auto& spec : expected_tensors(now.config)) {
      if (is_shared(spec.name)) continue;
      INFO(spec.name);
      CHECK(values(out, spec.name) == formats::read_f32(old.tensors.get(spec.name)));
    }
    // In the packed folder with embeddings they are the new target's.
    require_ok(dspark_run({"pack", out, "--target", second.target, "--out", second.at(from + "-packed")}));
    auto embeddings = target.tensor("model.embed_tokens.weight");
    for (float& v : embeddings) v = to_float(to_bf16(v));
    CHECK(values(second.at(from + "-packed"), "embed_tokens.weight") == embeddings);
    CHECK(values(second.at(from + "-packed"), "lm_head.weight") == embeddings);
  }
}

TEST_CASE("what does not fit a new target is named with both shapes, or starts new", "[init][cli]") {
  const Bench first;
  const auto drafter = first.make_drafter(first.make_store());  // width 64, 3 taps, 64 of 259 tokens, rank 8
  const auto old = [&](const std::string& name) { return values(drafter, name); };

  SECTION("another width") {
    const Bench b(12, 12, {.hidden = 96, .heads = 6});
    const auto store = b.make_store();
    check_fails(dspark_run(b.train(store, b.at("out"), 1, {"--init", drafter})), 1,
                {"--init", "fc.weight is [64, 192] there, [96, 288] here", "layers.0.mlp.down_proj.weight is [64, 96] there, [96, 96] here", "norm.weight is [64] there, [96] here",
                 "--init-partial"});
    check_fails(dspark_run(b.train(store, b.at("out"), 1, {"--init", drafter, "--dry-run"})), 1, {"fc.weight"});
    CHECK_FALSE(fs::exists(b.at("out")));
    const Ran ran = dspark_run(b.train(store, b.at("out"), 1, with(kStill, {"--init", drafter, "--init-partial"})));
    require_ok(ran);
    CHECK(ran.said("start new"));
    CHECK(values(b.at("out"), "markov_head.markov_w1.weight") == old("markov_head.markov_w1.weight"));
    CHECK(values(b.at("out"), "layers.0.self_attn.k_norm.weight") == old("layers.0.self_attn.k_norm.weight"));
    CHECK(values(b.at("out"), "norm.weight") == std::vector<float>(96, 1.0f));
  }
  SECTION("another vocabulary") {
    const Bench b(12, 12, {.extra_tokens = 5});
    const auto store = b.make_store();
    const Ran refused = dspark_run(b.train(store, b.at("out"), 1, {"--init", drafter}));
    check_fails(refused, 1, {"markov_head.markov_w1.weight is [259, 8] there, [264, 8] here", "markov_head.markov_w2.weight is [64, 8] of another tokenizer there, [64, 8] here"});
    CHECK(refused.said("another tokenizer (259 tokens) than tiny.gguf's (264)"));
    require_ok(dspark_run(b.train(store, b.at("out"), 1, with(kStill, {"--init", drafter, "--init-partial"}))));
    CHECK(values(b.at("out"), "fc.weight") == old("fc.weight"));
    CHECK(values(b.at("out"), "layers.0.self_attn.q_proj.weight") == old("layers.0.self_attn.q_proj.weight"));
    CHECK(read_drafter(b.at("out")).kept.size() == 64);
  }
  SECTION("another tokenizer of the same size") {
    Json config = read_json(drafter / "config.json");
    config["dspark_training"]["tokenizer_hash"] = std::string(64, 'a');
    write_bytes(drafter / "config.json", config.dump());
    const Ran refused = dspark_run(first.train(first.at("store"), first.at("out"), 1, {"--init", drafter}));
    check_fails(refused, 1, {"markov_head.markov_w1.weight is [259, 8] of another tokenizer there"});
    require_ok(dspark_run(first.train(first.at("store"), first.at("out"), 1, {"--init", drafter, "--init-partial"})));
  }
  SECTION("another shape of the drafter") {
    const auto train = [&](Bench::Arguments more) { return dspark_run(first.train(first.at("store"), first.at("out"), 1, with(with(kStill, {"--init", drafter}), more))); };
    check_fails(train({"--layers", "2"}), 1, {"11 of its tensors", "layers.1.mlp.up_proj.weight is none there, [96, 64] here"});
    check_fails(train({"--rank", "4"}), 1, {"markov_head.markov_w2.weight is [64, 8] there, [64, 4] here"});
    check_fails(train({"--markov", "none"}), 1, {"markov_head.markov_w1.weight is [259, 8] there, none here"});
    check_fails(train({"--no-confidence"}), 1, {"confidence_head.proj.bias is [1] there, none here"});
    check_fails(train({"--taps", "1,3"}), 1, {"fc.weight is [64, 192] there, [64, 128] here"});
    check_fails(train({"--warm-start", "target"}), 2, {"--warm-start target", "--init"});
    check_fails(dspark_run(first.train(first.at("store"), first.at("out"), 1, {"--init-partial"})), 2, {"--init-partial", "--init DRAFTER"});
    require_ok(train({"--layers", "2", "--init-partial"}));
    CHECK(values(first.at("out"), "layers.0.mlp.up_proj.weight") == old("layers.0.mlp.up_proj.weight"));
    CHECK(read_drafter(first.at("out")).config.n_layers() == 2);
    // Its two layers are alike: another number of them asks for no layer types.
    const auto three = [&](Bench::Arguments more) { return dspark_run(first.train(first.at("store"), first.at("three"), 1, with({"--init", first.at("out"), "--layers", "3"}, more))); };
    check_fails(three({}), 1, {"11 of its tensors", "layers.2."});
    require_ok(three({"--init-partial"}));
    CHECK(read_drafter(first.at("three")).config.n_layers() == 3);
  }
}

TEST_CASE("what a drafter was trained as stays when it goes on", "[init][cli]") {
  const Bench b;
  const auto store = b.make_store();
  require_ok(dspark_run(b.train(store, b.at("first"), 2,
                                {"--layers", "2", "--layer-types", "full,sliding", "--window", "9", "--window-rule", "anchor", "--non-causal", "--block", "5", "--layout", "bonus", "--markov", "rnn",
                                 "--rank", "6", "--no-confidence", "--draft-vocab", "40", "--taps", "1,3", "--mask-token", "200"})));
  const Bench::Arguments next = {"train", "--target", b.target, "--store", store, "--out", b.at("next"), "--steps", "2", "--batch-docs", "4", "--anchors", "8", "--init", b.at("first")};
  const Ran shown = dspark_run(with(next, {"--print-config"}));
  require_ok(shown);
  for (const char* line : {"layers               2                        init", "markov               rnn                      init", "draft-vocab          40                       init",
                           "window-rule          anchor                   init", "rotary               served                   init", "loss                 ce=0.1,tv=1.8,conf=1     recipe deepspec"}) {
    INFO(line << "\n" << shown.out);
    CHECK(shown.out.find(line) != std::string::npos);
  }
  require_ok(dspark_run(next));
  const DrafterConfig was = read_drafter(b.at("first")).config, is = read_drafter(b.at("next")).config;
  CHECK(drafter_config_json(is, {}) == drafter_config_json(was, {}));
  // The run is its own drafter once it has begun: the other one may be gone.
  for (const char* file : {"config.json", "model.safetensors"}) fs::remove(b.at("next") / file);
  fs::remove_all(b.at("first"));
  const Ran again = dspark_run(next);
  require_ok(again);
  CHECK(again.said("resuming"));
}

// The loss as a function of single weights of embed_tokens and lm_head, by central differences in fp64.
TEST_CASE("gradients of a drafter's own embeddings and head", "[init]") {
  const auto backend = make_backend({.device = "ref", .precision = Precision::fp64});
  Context& ctx = backend->context();
  for (const Markov markov : {Markov::none, Markov::vanilla, Markov::rnn}) {
    DrafterConfig c;
    c.hidden = 12, c.target_hidden = 8, c.ffn = 16, c.heads = 2, c.kv_heads = 1, c.head_dim = 8;
    c.vocab = c.draft_vocab = 23, c.layers = {LayerType::full}, c.taps = {{1}, {2}}, c.block = 4, c.mask_token = 22, c.max_position = 64;
    c.markov = markov, c.rank = markov == Markov::none ? 0 : 5;
    c.confidence = false;  // its target is detached: no difference of the loss knows that
    Drafter drafter(ctx, c, DrafterOptions{.train_embeddings = true});
    const Rng rng(31, RngStream::test);
    uint64_t draws = 0;
    const auto normals = [&](int64_t n, double mean = 0) {
      std::vector<double> v(static_cast<size_t>(n));
      for (double& x : v) x = mean + 0.5 * rng.normal(draws++);
      return v;
    };
    for (Parameter& p : drafter.parameters()) {
      CHECK(p.trainable);
      const auto v = normals(p.value.size(), p.name.ends_with("norm.weight") ? 1 : 0);
      drafter.set(p, {v.data(), DType::f64, p.value.rows, p.value.cols, p.value.cols});
    }
    drafter.refresh();
    train::TargetHead target;
    const auto head = normals(23 * 8);
    target.head.value = ctx.allocate(ctx.act_dtype(), 23, 8);
    ctx.upload_now(target.head.value, {head.data(), DType::f64, 23, 8, 8});
    refresh(ctx, {&target.head});
    target.apply_norm = false;

    std::vector<int32_t> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back(static_cast<int32_t>(rng.below(draws++, 22)));
    const std::vector<uint8_t> mask(20, 1);
    const std::vector<PackedDocument> documents{{0, 11}, {11, 20}};
    const std::vector<int32_t> anchors{1, 4, 9, 12};
    PlanInput in = plan_input(c);
    in.tokens = tokens, in.mask = mask, in.documents = documents, in.anchors = anchors;
    train::MicroBatch batch;
    batch.plan = make_batch_plan(in);
    const auto taps = normals(20 * 16), last = normals(20 * 8);
    batch.taps = {taps.data(), DType::f64, 20, 16, 16};
    batch.last = {last.data(), DType::f64, 20, 8, 8};
    const train::Objective objective = train::deepspec_objective(c.confidence);
    train::TrainStep step(ctx, drafter, target, objective, {int64_t{16} << 20, int64_t{16} << 20, 1 << 20});
    const auto loss = [&] {
      const auto m = step.run(batch, false, Write::overwrite);
      double sum = 0;
      for (size_t t = 0; t < kNumTerms; ++t) sum += objective.coef[t] * m.term_sum[t] * objective.scale(static_cast<int>(t), batch.plan);
      return sum;
    };
    step.run(batch, true, Write::overwrite);
    for (const char* name : {"embed_tokens.weight", "lm_head.weight"}) {
      Parameter& p = *drafter.find(name);
      const auto rows = p.value.rows, cols = p.value.cols;
      std::vector<double> gradient(static_cast<size_t>(p.value.size())), value(gradient.size());
      ctx.download_now({gradient.data(), DType::f64, rows, cols, cols}, p.grad);
      ctx.download_now({value.data(), DType::f64, rows, cols, cols}, p.value);
      double largest = 0;
      for (const double g : gradient) largest = std::max(largest, std::abs(g));
      CHECK(largest > 1e-3);
      // Rows of the anchors' tokens, of the mask, of one that no block holds, and some others.
      for (int i = 0; i < 40; ++i) {
        const auto at = static_cast<size_t>(i < 12 ? 22 * cols + i : i < 20 ? tokens[4] * cols + i - 12 : static_cast<int64_t>(rng.below(draws++, gradient.size())));
        constexpr double kStep = 1e-5;  // error h^2/6 f''' + 1e-16 |f| / h: 1e-9 of a gradient of order 1
        const auto at_shift = [&](double shift) {
          std::vector<double> v = value;
          v[at] += shift;
          drafter.set(p, {v.data(), DType::f64, rows, cols, cols});
          drafter.refresh();
          return loss();
        };
        const double slope = (at_shift(kStep) - at_shift(-kStep)) / (2 * kStep);
        at_shift(0);
        INFO(name << " element " << at << ": " << gradient[at] << ", by differences " << slope);
        CHECK(std::abs(slope - gradient[at]) <= 1e-7 * std::max(largest, 1.0));
      }
    }
    // Added to, not replaced, by a second micro-step.
    const Parameter& p = *drafter.find("embed_tokens.weight");
    std::vector<double> once(static_cast<size_t>(p.grad.size())), twice(once.size());
    step.run(batch, true, Write::overwrite);
    ctx.download_now({once.data(), DType::f64, p.grad.rows, p.grad.cols, p.grad.cols}, p.grad);
    step.run(batch, true, Write::add);
    ctx.download_now({twice.data(), DType::f64, p.grad.rows, p.grad.cols, p.grad.cols}, p.grad);
    for (size_t i = 0; i < once.size(); ++i) CHECK(twice[i] == Approx(2 * once[i]).epsilon(1e-14));
    ctx.free(target.head.value);
  }
}

TEST_CASE("a drafter of another width trains, goes on and decodes with its own embeddings", "[init][cli]") {
  const Bench b;
  const auto store = b.make_store();
  for (const std::string width : {"32", "80"}) {
    INFO(width);
    const auto out = b.at("w" + width);
    const Bench::Arguments more = {"--hidden", width, "--json", b.at(width + ".json")};
    require_ok(dspark_run(b.train(store, out, 12, more)));
    const DrafterFiles files = read_drafter(out);
    CHECK(files.config.hidden == std::stoll(width));
    CHECK(files.config.target_hidden == 64);
    CHECK(files.config.ffn == (width == "32" ? 48 : 128));
    CHECK(files.from_target.empty());
    CHECK(files.tensors.get("embed_tokens.weight").shape == std::vector<int64_t>{259, files.config.hidden});
    CHECK(files.tensors.get("lm_head.weight").shape == std::vector<int64_t>{64, files.config.hidden});
    // Both move.
    require_ok(dspark_run(b.train(store, b.at("still" + width), 1, with(kStill, {"--hidden", width}))));
    for (const char* name : {"embed_tokens.weight", "lm_head.weight"}) CHECK(values(out, name) != values(b.at("still" + width), name));
    const auto lines = json_lines(file_bytes(b.at(width + ".json")));
    CHECK(lines.back().at("trainable") == lines.back().at("parameters"));
    // Weights are learnt: the loss falls.
    CHECK(lines.at(11).at("loss").get<double>() < lines.front().at("loss").get<double>());
    const Ran eval = dspark_run({"eval", "--target", b.target, "--drafter", out, "--data", b.rows, "--limit", "2", "--max-new-tokens", "12", "--temperature", "0"});
    require_ok(eval);
    CHECK(eval.out.find("greedy output equals plain decoding on 2 of 2 prompts") != std::string::npos);
    // It goes on as it is, embeddings and all; and a folder without them is not a drafter.
    require_ok(dspark_run(b.train(store, b.at("next" + width), 1, with(kStill, {"--init", out}))));
    for (const char* name : {"embed_tokens.weight", "lm_head.weight", "fc.weight"}) CHECK(values(b.at("next" + width), name) == values(out, name));
    require_ok(dspark_run({"pack", out, "--out", b.at("packed" + width)}));
    CHECK(values(b.at("packed" + width), "embed_tokens.weight") == values(out, "embed_tokens.weight"));
    fs::copy(out, b.at("bare" + width), fs::copy_options::recursive);
    {
      const formats::SafetensorsFile file(out / "model.safetensors");
      std::vector<formats::TensorView> kept;
      for (const auto& t : file.tensors())
        if (t.name != "embed_tokens.weight") kept.push_back(t);
      formats::write_safetensors(b.at("bare" + width) / "model.safetensors", kept);
    }
    check_fails(dspark_run({"pack", b.at("bare" + width), "--inspect"}), 1, {"embed_tokens.weight", fmt::format("[259, {}]", width), "it cannot be the target's, whose width is 64"});
  }
  require_ok(dspark_run(b.train(store, b.at("whole"), 1, {"--hidden", "32", "--draft-vocab", "0"})));
  CHECK(read_drafter(b.at("whole")).tensors.get("lm_head.weight").shape == std::vector<int64_t>{259, 32});
  check_fails(dspark_run({"pack", b.at("whole"), "--to", "deepspec", "--target", b.target, "--out", b.at("deepspec")}), 1, {"DeepSpec", "width", "32", "64"});
  check_fails(dspark_run(b.train(store, b.at("warm"), 1, {"--hidden", "32", "--warm-start", "target"})), 1, {"warm start", "64", "32", "--warm-start none"});
  check_fails(dspark_run(b.train(store, b.at("warm"), 1, {"--hidden", "-1"})), 2, {"--hidden -1"});
}
