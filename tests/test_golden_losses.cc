// vocab_loss against the public trainers' loss registry (kind drafter_losses: ce, tv, kl, rkl, jsd, nla, lk_hybrid on
// one forward): every term per slot and its gradient at the logits. Both heads are the identity, so the operator starts
// from the very logits of the fixture. Tolerances of the fixtures' README: outputs 1e-11 | 5e-6, gradients 1e-10 |
// 2e-5.
#include <catch2/catch.hpp>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "golden.h"
#include "model/backends.h"

using namespace dspark;
using namespace dspark::golden;
using namespace dspark::model;

namespace {

const std::pair<Term, const char*> kLosses[] = {{kCe, "ce"},   {kTv, "tv"},   {kKl, "kl_div"},   {kRkl, "rkl"},
                                                {kJsd, "jsd"}, {kNla, "nla"}, {kLk, "lk_hybrid"}};

struct Tolerance {
  const char* device;
  Precision precision;
  double outputs, gradients;
};

// The supervised slots of a case, over its logits.
struct Slots {
  explicit Slots(const formats::SafetensorsFile& file) : vocab(file.get("out.logits").shape.at(1)) {
    const std::vector<int64_t> mask = formats::read_i64(file.get("out.slot_mask"));
    for (size_t i = 0; i < mask.size(); ++i)
      if (mask[i] != 0) rows.push_back(static_cast<int64_t>(i));
    logits = of(values(file, "out.logits"));
    target = of(values(file, "out.target_logits"));
    weight = of(values(file, "out.weight.all"));
    for (size_t s = 0; s < rows.size(); ++s) {
      const auto first = target.begin() + static_cast<int64_t>(s) * vocab;
      label.push_back(
          static_cast<int32_t>(std::max_element(first, first + vocab) - first));  // speculators: the target's arg-max
      own_row.push_back(static_cast<int32_t>(s));
    }
  }
  int64_t n() const { return static_cast<int64_t>(rows.size()); }
  std::vector<double> of(const std::vector<double>& all) const {
    const int64_t total = static_cast<int64_t>(all.size());
    const int64_t cols = total % vocab == 0 ? vocab : 1;
    std::vector<double> v;
    for (const int64_t r : rows) v.insert(v.end(), all.begin() + r * cols, all.begin() + (r + 1) * cols);
    return v;
  }

  int64_t vocab;
  std::vector<int64_t> rows;
  std::vector<double> logits, target, weight;
  std::vector<int32_t> label, own_row;
};

struct Result {
  std::vector<double> slot_out, d_logits;
};

// One term, coefficient 1; the denominator is speculators' number of supervised slots + 1e-5.
Result run_term(Context& ctx, const Slots& s, Term term) {
  std::vector<Tensor> owned;
  const auto make = [&](DType dtype, int64_t rows, int64_t cols) {
    owned.push_back(ctx.allocate(dtype, rows, cols));
    return owned.back();
  };
  const auto upload = [&](DType dtype, int64_t rows, int64_t cols, const std::vector<double>& v) {
    const Tensor t = make(dtype, rows, cols);
    ctx.upload_now(t, {v.data(), DType::f64, rows, cols, cols});
    return t;
  };
  const auto upload_ints = [&](const std::vector<int32_t>& v) {
    const auto n = static_cast<int64_t>(v.size());
    const Tensor t = make(DType::i32, 1, n);
    ctx.upload_now(t, {v.data(), DType::i32, 1, n, n});
    return t;
  };
  const auto download = [&](const Tensor& t) {
    std::vector<double> v(static_cast<size_t>(t.size()));
    ctx.download_now({v.data(), DType::f64, t.rows, t.cols, t.cols}, t);
    return v;
  };
  std::vector<double> identity(static_cast<size_t>(s.vocab * s.vocab), 0.0);
  for (int64_t i = 0; i < s.vocab; ++i) identity[static_cast<size_t>(i * s.vocab + i)] = 1;
  const DType act = ctx.act_dtype(), acc = ctx.acc_dtype();
  Weight head;
  head.value = upload(act, s.vocab, s.vocab, identity);
  head.needs_input_gradient = true;
  refresh(ctx, {&head});

  VocabLoss a;
  a.joint = upload(act, s.n(), s.vocab, s.logits);
  a.head = &head;
  a.target_state = upload(act, s.n(), s.vocab, s.target);
  a.target_head = &head;
  a.target_row = upload_ints(s.own_row);
  a.label = upload_ints(s.label);
  a.weight = upload(acc, 1, s.n(), s.weight);
  a.conf_weight = a.weight;
  a.scale = upload(acc, 1, kNumTerms, std::vector<double>(kNumTerms, 1 / (static_cast<double>(s.n()) + 1e-5)));
  a.coef[term] = 1;
  a.hidden_cols = s.vocab;
  const LossChunk whole{0, s.n(), 0, s.n()};
  a.chunks = {&whole, 1};
  a.slot_out = make(acc, s.n(), kSlotOutCols);
  a.d_joint = make(acc, s.n(), s.vocab);
  a.work = make(DType::u8, 1, vocab_loss_work(ctx, s.n(), s.n(), s.vocab, s.vocab));
  vocab_loss(ctx, a);
  const Result result{download(a.slot_out), download(a.d_joint)};
  for (const Tensor& t : owned) ctx.free(t);
  return result;
}

}  // namespace

TEST_CASE("every loss term and its gradient agree with the public trainers", "[golden][ops]") {
  const std::vector<Case> all = cases("drafter_losses");
  REQUIRE_FALSE(all.empty());
  for (const Tolerance& tol :
       {Tolerance{"ref", Precision::fp64, 1e-11, 1e-10}, Tolerance{"cpu", Precision::fp32, 5e-6, 2e-5}}) {
    BackendOptions options;
    options.device = tol.device;
    options.precision = tol.precision;
    const auto backend = make_backend(options);
    for (const Case& c : all) {
      const Json d = description(c);
      if (d.at("rules").at("label") != "target_argmax" || d.at("rules").at("denominator") != "count") {
        WARN(c.name << " follows other rules than this test: not compared");
        continue;
      }
      const formats::SafetensorsFile file(c.folder / "tensors.safetensors");
      const Slots slots(file);
      Report report("drafter_losses", c.name + " on " + tol.device);
      for (const auto& [term, name] : kLosses) {
        if (!file.find("out.term." + std::string(name))) continue;
        const Result got = run_term(backend->context(), slots, term);
        std::vector<double> per_slot, accept;
        for (int64_t s = 0; s < slots.n(); ++s) {
          per_slot.push_back(got.slot_out[static_cast<size_t>(s * kSlotOutCols + term)]);
          accept.push_back(got.slot_out[static_cast<size_t>(s * kSlotOutCols + kAccept)]);
        }
        const std::string term_name = "out.term." + std::string(name),
                          grad_name = "grad." + std::string(name) + ".out.logits";
        CHECK(report.check(term_name, relative_2norm(per_slot, slots.of(values(file, term_name))), tol.outputs));
        CHECK(report.check("out.accept_rate", relative_2norm(accept, slots.of(values(file, "out.accept_rate"))),
                           tol.outputs));
        CHECK(report.check(grad_name, relative_2norm(got.d_logits, slots.of(values(file, grad_name))), tol.gradients));
      }
    }
  }
}
