// BatchPlan: everything the device needs to know about a batch, worked out on the host one step ahead.
//
// Input is one packed row: documents one after the other, with anchors chosen (train/anchors.h). The plan lists block tokens and
// positions, supervised slots in anchor order (the rest never reaches the loss), the unique target rows they need, the Markov
// inputs with their scatter lists, weights and chunks. Device code never sorts or compacts.
//
// Slot k of an anchor at row r (position p in its document):   anchor layout            bonus layout
//   label row                                                   r + k + 1                r + k  (k >= 1; slot 0 never)
//   Markov input row (the token before the label)               r + k                    r + k - 1 (slot 0: r)
//   target row (the state that predicts the label)              label row - 1            label row - 1
// With SlotRule::row_mask a label row may lie behind the packed row's end (its label is then -1: these labels are the target's
// arg-max), and target rows wrap around, as in speculators.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/drafter_config.h"
#include "model/ops.h"

namespace dspark::model {

struct PackedDocument {
  int64_t begin = 0, end = 0;  // rows
};

// Which slots are supervised (DESIGN 4).
enum class SlotRule : uint8_t {
  label_prefix,  // deepspec: the label is in the document and in the mask, and so for every earlier slot
  row_mask,      // speculators: mask[r + k] of the packed row; a slot may lie in the next document, as there (issues 865, 901)
};

struct PlanInput {
  std::span<const int32_t> tokens;         // [T]
  std::span<const uint8_t> mask;           // [T], 1: may be a label
  std::span<const PackedDocument> documents;
  std::span<const int32_t> anchors;        // rows, ascending; -1 only as padding at the end
  std::span<const int32_t> draft_id;       // [V]: draft id of a target id, -1 when it was not kept; empty: identity
  int64_t block = 0;
  int64_t mask_token = 0;
  bool sample_from_anchor = true;
  bool markov = true;
  bool markov_rnn = false;                 // the head runs over whole blocks, not over supervised slots
  bool train_embeddings = false;
  formats::RopeConfig rope;                // `dynamic` has frequencies that depend on the row
  int64_t head_dim = 0, max_position = 0;
  SlotRule slots = SlotRule::label_prefix;
  double gamma = 4.0;                      // w_k = exp(-k/gamma); 0: no decay
  int64_t chunk_slots = 0;                 // at most this many slots a loss chunk (at least one anchor)
};

// Everything about the drafter that a plan depends on.
PlanInput plan_input(const DrafterConfig& drafter);

// Sources grouped by the table row they add to: row_of[j] takes source[begin[j] .. begin[j + 1]).
struct ScatterList {
  std::vector<int32_t> row_of, begin, source;
};

struct BatchPlan {
  int64_t n_context = 0, n_anchors = 0, block = 0;
  std::vector<int32_t> context_position;               // [T]
  std::vector<int32_t> block_token, block_position;    // [A*B]
  std::vector<int32_t> anchor_row, doc_start;          // [A]
  // supervised slots, [S]
  std::vector<int32_t> slot_row;                       // into [A*B]
  std::vector<int32_t> slot_index;                     // k
  std::vector<int32_t> block_of;                       // the slot's anchor
  std::vector<int32_t> target_row;                     // into target_source
  std::vector<int32_t> label;                          // draft id or -1
  std::vector<int32_t> label_token;                    // target id
  std::vector<int32_t> previous_token;                 // Markov input, target id
  std::vector<double> weight;                          // w_k
  std::vector<int32_t> block_previous;                 // [A*B] Markov input of every slot, supervised or not (rnn heads)
  std::vector<int32_t> target_source;                  // [P] context rows, ascending
  ScatterList markov;                                  // previous token -> slots (-> block rows for rnn heads)
  ScatterList embed;                                   // block token -> block rows, where embeddings are trained
  std::vector<double> inv_freq;                        // [rot/2] of a row too long for the drafter's own; else empty
  std::vector<LossChunk> chunks;
  double weight_sum = 0;
  int64_t supervised_blocks = 0;                       // blocks with at least one supervised slot
  int64_t max_chunk_slots = 0, max_chunk_rows = 0;

  int64_t n_slots() const { return static_cast<int64_t>(slot_row.size()); }
};

BatchPlan make_batch_plan(const PlanInput& input);

// The supervised slots of one anchor: how many of the block's leading slots have their label in the document with mask set and
// every earlier slot supervised (DESIGN 4, `deepspec`). In the bonus layout slot 0 does not count and is never supervised.
int64_t supervised_prefix(std::span<const uint8_t> mask, const PackedDocument& document, int64_t anchor_row, int64_t block,
                          bool sample_from_anchor);

// The same lists on the device: views of one array, which comes over in one copy.
struct DeviceBatch {
  int64_t n_anchors = 0, block = 0;
  Tensor context_position, block_token, block_position, anchor_row, doc_start;
  Tensor slot_row, block_of, target_row, label, previous_token, block_previous, weight, target_source;
  struct Scatter {
    Tensor row_of, begin, source;
  } markov, embed;
  Tensor inv_freq;  // acc [1, rot/2] or empty
};

// Allocates in `arena` and uploads on `queue`. The plan, and `lists`, which the lists of numbers are gathered in, must stay as they are
// until that has happened.
DeviceBatch upload_batch(Context& ctx, Arena& arena, const BatchPlan& plan, Queue queue, std::vector<int32_t>& lists);

}  // namespace dspark::model
