// One training step or one validation, as everything outside sees it: a line of JSON (--json, OUT/history.jsonl), a line for people, and
// TensorBoard's scalars. The JSON is the one list of what is measured; the other two and the report page read it or the same record.
#pragma once

#include <string>
#include <vector>

#include "core/json.h"
#include "formats/tensorboard.h"
#include "train/trainer.h"

namespace dspark::job {

// `limit`: FLOP/s of this machine's matrix products, for `mfu`; 0 leaves it out.
OrderedJson record_json(const train::StepRecord& record, const train::Objective& objective, double limit);

// At most 100 columns as long as steps have at most 7 digits. `seconds_left` < 0: not known.
std::string record_line(const train::StepRecord& record, double seconds_left);

// Number of the first proposed token's slot in accept_rate and top1: the bonus layout has a slot before it that is never supervised.
inline size_t first_slot(bool sample_from_anchor) { return sample_from_anchor ? 0 : 1; }
// All numbers of record_json but the terms without a coefficient and the calibration's; validation's under validation/.
std::vector<formats::Scalar> record_scalars(const OrderedJson& record, const train::Objective& objective, size_t first_slot);

}  // namespace dspark::job
