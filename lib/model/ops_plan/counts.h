// What every operator costs, from its shapes alone.
//
// flops: a multiply and an add are two; products and attention are exact for what they compute, element-wise operators
// count their arithmetic with exp, log, sqrt, sin and cos as one each. Bytes: every operand read once and every result
// written once (added to: read and written), as if caches were perfect within an operator. Anchor attention depends on
// where anchors sit, which a plan does not know: it counts anchors spread evenly over one document of all context rows, an
// upper bound for packed rows of several documents.
#pragma once

#include "model/backends.h"

namespace dspark::model::plan {

// What kind of work an operator is, and the part it works for whatever the label says.
template <typename Args>
inline constexpr Work kWork = Work::rows;
template <> inline constexpr Work kWork<Linear> = Work::product;
template <> inline constexpr Work kWork<LinearDx> = Work::product;
template <> inline constexpr Work kWork<LinearDw> = Work::gradient_product;
template <> inline constexpr Work kWork<AnchorAttention> = Work::attention;
template <> inline constexpr Work kWork<CacheAttention> = Work::attention;
template <> inline constexpr Work kWork<AnchorAttentionBackward> = Work::attention_backward;
template <> inline constexpr Work kWork<SumSquares> = Work::update;
template <> inline constexpr Work kWork<FinishNorm> = Work::update;
template <> inline constexpr Work kWork<AdamW> = Work::update;
template <> inline constexpr Work kWork<Muon> = Work::muon;
template <> inline constexpr Work kWork<Refresh> = Work::pack;

inline Label booked(Label label, Work work) {
  switch (work) {
    case Work::attention: return {Part::attention, false};
    case Work::attention_backward: return {Part::attention, true};
    case Work::update:
    case Work::muon:
    case Work::pack: return {Part::optimizer, false};
    default: return label;
  }
}

#define DS_DECLARE(name, Args) PlanCounts cost(const Args& a);
DS_OPS(DS_DECLARE)
#undef DS_DECLARE

// What the cpu backend's packings of a weight take.
int64_t packed_bytes(const Weight& w);

// An operator's cost as the ledger books it: one entry, but for the loss head, which is several kinds of work for two parts.
template <typename Args>
std::vector<PlanEntry> entries(const Args& a, Label label) {
  return {{booked(label, kWork<Args>), kWork<Args>, cost(a)}};
}
std::vector<PlanEntry> entries(const VocabLoss& a, Label label);

// The products an operator does with a weight; m is rows for "packed", a weight's rows for "tn".
template <typename Args>
std::vector<PlanProduct> products(const Args&) {
  return {};
}
std::vector<PlanProduct> products(const Linear& a);
std::vector<PlanProduct> products(const LinearDx& a);
std::vector<PlanProduct> products(const LinearDw& a);
std::vector<PlanProduct> products(const VocabLoss& a);

}  // namespace dspark::model::plan
