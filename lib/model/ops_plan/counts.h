// What every operator costs, from its shapes alone.
//
// flops: a multiply and an add are two; products and attention are exact for what they compute, element-wise operators
// count their arithmetic with exp, log, sqrt, sin and cos as one each. Bytes: every operand read once and every result
// written once (added to: read and written), as if caches were perfect; the loss head's logits stay in its work memory
// and are not counted. Anchor attention depends on where anchors sit, which a plan does not know: it counts anchors
// spread evenly over one document of all context rows, so half of the rows each (cut by the window): an upper bound for
// packed rows of several documents.
#pragma once

#include "model/backends.h"

namespace dspark::model::plan {

#define DS_DECLARE(name, Args) PlanCounts cost(const Args& a);
DS_OPS(DS_DECLARE)
#undef DS_DECLARE

}  // namespace dspark::model::plan
