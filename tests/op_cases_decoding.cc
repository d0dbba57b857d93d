// Cases of token_probs, sample_tokens, verify_block.
#include "op_table.h"

namespace dspark::test {

using namespace model;

namespace {

void probs(OpRun& run, int64_t n, int64_t vocab, const SamplingParams& params) {
  token_probs(run.ctx(), {run.row_output("probs", Kind::acc, n, 1, vocab),
                          run.row_input("logits", Kind::acc, n, 1, vocab, 3), params});
}

void sample(OpRun& run, bool with_map) {
  // cumulative sums in steps of 1/4 and uniforms away from them; the last row's total is not 1
  const Tensor p =
      run.given("probs", Kind::acc, 4, 5, {0.25, 0, 0.25, 0.25, 0.25, 0, 0, 0, 1, 0, 0.5, 0.5, 0, 0, 0, 1, 1, 1, 1, 4});
  const Tensor u = run.uniform("uniform", {0.26, 0.99, 0.0, 0.55});
  const Tensor map = with_map ? run.ints("map", {100, 7, 50, 3, 900}) : Tensor{};
  const Tensor raw = with_map ? run.int_output("raw", 4) : Tensor{};
  sample_tokens(run.ctx(), {run.int_output("ids", 4), p, u, map, raw});
}

struct Round {
  std::string name;
  std::vector<int64_t> draft_ids, map;
  std::vector<double> draft, target, uniform;
};

void verify(OpRun& run, const Round& r, int64_t vocab) {
  const auto n = static_cast<int64_t>(r.draft_ids.size());
  const int64_t draft_vocab = r.map.empty() ? vocab : static_cast<int64_t>(r.map.size());
  VerifyBlock a;
  a.result = run.int_output("result", 2);
  a.draft_ids = run.ints("draft_ids", r.draft_ids);
  a.draft_probs = run.given("draft", Kind::acc, n, draft_vocab, r.draft);
  if (!r.map.empty()) a.map = run.ints("map", r.map);
  a.target_probs = run.given("target", Kind::acc, n + 1, vocab, r.target);
  a.uniform = run.uniform("uniform", r.uniform);
  a.work = run.work(Kind::acc, vocab);
  verify_block(run.ctx(), a);
}

}  // namespace

void add_decoding_cases(OpCases& cases) {
  const std::vector<std::pair<std::string, SamplingParams>> settings = {
      {"as they are", {}},
      {"greedy", {.temperature = 0}},
      {"temperature 0.6", {.temperature = 0.6}},
      {"top-k 5", {.top_k = 5}},
      {"top-k over the vocabulary", {.top_k = 1000}},
      {"top-p 0.8", {.top_p = 0.8}},
      {"min-p 0.1", {.min_p = 0.1}},
      {"all together", {.temperature = 1.3, .top_k = 20, .top_p = 0.9, .min_p = 0.02}}};
  for (const auto& [name, params] : settings)
    for (const auto& [n, vocab] : {std::pair<int64_t, int64_t>{0, 3}, {1, 1}, {4, 67}, {2, 515}})
      cases.push_back({"token_probs", fmt::format("{}, [{}, {}]", name, n, vocab),
                       [=, n = n, vocab = vocab, params = params](OpRun& run) { probs(run, n, vocab, params); }, n});
  for (const auto& [name, params] : settings) {
    cases.push_back({"token_probs", "ties, " + name, [=, params = params](OpRun& run) {
                       const Tensor logits =
                           run.given("logits", Kind::acc, 2, 9, {1, 2, 2, 0, 2, 2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
                       token_probs(run.ctx(), {run.output("probs", Kind::acc, 2, 9), logits, params});
                     }});
  }
  cases.push_back({"token_probs", "masked logits, in place", [](OpRun& run) {
                     const double masked = -std::numeric_limits<double>::infinity();
                     const Tensor p = run.output("probs", Kind::acc, 1, 5);
                     copy(run.ctx(), {p, run.given("logits", Kind::acc, 1, 5, {masked, 1, masked, 2, 0})});
                     token_probs(run.ctx(), {p, p, {.temperature = 0.5, .top_k = 4, .top_p = 0.9, .min_p = 0.01}});
                   }});
  cases.push_back({"sample_tokens", "plain", [](OpRun& run) { sample(run, false); }});
  cases.push_back({"sample_tokens", "mapped", [](OpRun& run) { sample(run, true); }});
  cases.push_back(
      {"sample_tokens", "none", [](OpRun& run) {
         sample_tokens(
             run.ctx(),
             {run.int_output("ids", 0), run.input("probs", Kind::acc, 0, 3), run.uniform("uniform", {}), {}, {}});
       }});
  const std::vector<Round> rounds = {
      {"nothing drafted", {}, {}, {}, {0.25, 0.25, 0.25, 0.25}, {0.6}},
      {"all accepted",
       {1, 2},
       {},
       {0.25, 0.5, 0.25, 0, 0.125, 0.125, 0.5, 0.25},
       {0, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.5, 0, 0, 0.5},
       {0.99, 0.49, 0.75}},
      {"first refused: residual of target over draft",
       {1, 2},
       {},
       {0.25, 0.5, 0.25, 0, 0.125, 0.125, 0.5, 0.25},
       {0.5, 0.125, 0.125, 0.25, 0.25, 0.25, 0.25, 0.25, 0.5, 0, 0, 0.5},
       {0.26, 0.1, 0.6}},
      {"second refused",
       {1, 2},
       {},
       {0.25, 0.5, 0.25, 0, 0.125, 0.125, 0.5, 0.25},
       {0, 1, 0, 0, 0.75, 0.125, 0.125, 0, 0.5, 0, 0, 0.5},
       {0.9, 0.26, 0.1}},
      {"the border itself is a refusal", {0}, {}, {0.5, 0.5, 0, 0}, {0.25, 0.75, 0, 0, 1, 0, 0, 0}, {0.5, 0.5}},
      {"a pruned draft vocabulary",
       {3, 1},
       {1, 3},
       {0.5, 0.5, 0.75, 0.25},
       {0.25, 0.25, 0.25, 0.25, 0.5, 0.25, 0.25, 0, 0, 0, 1, 0},
       {0.4, 0.4, 0.7}},
      {"no residual left: the target itself", {0}, {}, {1, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 1}, {0.5, 0.5}},
  };
  for (const Round& r : rounds) cases.push_back({"verify_block", r.name, [=](OpRun& run) { verify(run, r, 4); }});
}

}  // namespace dspark::test
