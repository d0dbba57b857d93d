// Data: which documents a step trains on, and those documents as packed rows on the host.
//
// A Dataset is one or more stores, split into training and validation documents by conversation: the rows of one are never on
// both sides, since a later one repeats the text of those before it. The order is a function of the seed alone: step s takes
// documents [s*N, (s+1)*N) of the endless stream of shuffled epochs, so that resuming needs no state. A store of weight w gives
// each of its documents w times an epoch; of the fraction, each epoch draws which documents have it. A StepBatch is a step's
// documents packed whole into rows of about `row_tokens`; rows are the micro-steps. Several ranks deal the rows among them: what a step
// trains on never depends on their number.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "formats/sample_source.h"
#include "model/batch_plan.h"
#include "model/drafter_config.h"
#include "train/step.h"

namespace dspark::train {

struct DocumentRef {
  const formats::SampleSource* source = nullptr;
  int64_t index = 0;
  uint64_t id = 0, conversation = 0;
  int64_t n_tokens = 0, n_mask = 0;
};

class Dataset {
 public:
  // Keeps documents with at least one anchor candidate possible (2 masked tokens); the rest are counted. A document that several
  // stores have is the first one's. `weights`: one a source, or none for 1 each.
  Dataset(std::vector<std::unique_ptr<formats::SampleSource>> sources, double val_fraction, uint64_t seed, std::vector<double> weights = {});

  const std::vector<DocumentRef>& training() const { return training_; }
  const std::vector<DocumentRef>& validation() const { return validation_; }
  const std::vector<std::unique_ptr<formats::SampleSource>>& sources() const { return sources_; }
  const formats::StoreIdentity& identity() const { return sources_.front()->identity(); }
  int64_t unused() const { return unused_; }  // documents without a possible anchor
  int64_t longest() const { return longest_; }
  int64_t training_tokens() const { return tokens_; }
  // Anchors that a row packed up to `row_tokens` has at most, `anchors` a document being drawn: what the arena is sized for.
  int64_t most_anchors(int64_t row_tokens, int64_t anchors) const;
  int64_t epoch_size() const { return epoch_size_; }  // documents an epoch, repeated ones as often as they come

  // Document number `position` of the endless training stream. `epoch` differs between any two visits to the same document: what
  // is drawn in it (anchors, noise) differs too.
  struct Draw {
    DocumentRef document;
    int64_t epoch;
  };
  Draw draw(int64_t position) const;

 private:
  struct Visit {
    int32_t document, copy;
  };
  std::vector<Visit> make_epoch(int64_t epoch) const;

  std::vector<std::unique_ptr<formats::SampleSource>> sources_;
  std::vector<DocumentRef> training_, validation_;
  uint64_t seed_;
  int64_t unused_ = 0, longest_ = 0, tokens_ = 0, epoch_size_ = 0, copies_ = 1;
  struct Share {  // of a source in an epoch
    int64_t whole = 1, extra = 0;  // each document `whole` times, `extra` of them once more
    std::vector<int32_t> documents;
  };
  std::vector<Share> shares_;
  mutable std::vector<std::pair<int64_t, std::vector<Visit>>> orders_;  // the last few epochs
};

// Counts of label tokens over the training documents, [V].
std::vector<int64_t> count_labels(const Dataset& data, int64_t vocab);
// The `n` most frequent ids and every id in `always`, ascending; ties by lower id.
std::vector<int32_t> choose_draft_vocab(const std::vector<int64_t>& counts, int64_t n, const std::vector<int32_t>& always);

struct HostRow {
  uint64_t first_id = 0;  // of its first document
  int64_t epoch = 0;
  std::vector<int32_t> tokens, anchors;
  std::vector<uint8_t> mask;
  std::vector<model::PackedDocument> documents;
  std::vector<bf16> states;  // [T, (L+1)*E]
  MicroBatch batch;          // views into the above
};
struct StepBatch {
  std::vector<std::unique_ptr<HostRow>> rows;
  double weight_sum = 0;
  int64_t tokens = 0, slots = 0;
  int64_t micro_steps = 0;  // of the rank that has most rows; what follows them has none here
  double flops = 0;  // of its rows (StepFlops); 0: nobody counted
};

struct PackOptions {
  int64_t row_tokens = 1024;
  int64_t anchors = 512;     // a document
  int64_t chunk_slots = 256;
  double gamma = 4;
  uint64_t seed = 0;
  model::SlotRule slots = model::SlotRule::label_prefix;
  bool anchors_per_row = false;  // `anchors` a packed row, by speculators' rule
  double tap_noise = 0;          // uniform in +-tap_noise on every tap, by (seed, epoch, document)
  bool states = true;            // false: rows without states, to plan with
};

// What a row looks like to the drafter: block, mask token, kept vocabulary.
struct PackTarget {
  const model::DrafterConfig* config = nullptr;
  std::vector<int32_t> draft_id;  // [V] or empty
  std::vector<int> parts;         // which of the store's columns are the drafter's taps; the last state is always read
};

// Documents packed whole, in their order.
using RowDocuments = std::vector<Dataset::Draw>;
std::vector<RowDocuments> pack_documents(const std::vector<Dataset::Draw>& documents, int64_t row_tokens);
// The rows that each rank takes, as indices in ascending order: as many as anyone else or one less, and of the long ones its share. A
// rank's i-th row belongs to micro-step i.
std::vector<std::vector<size_t>> deal_rows(const std::vector<RowDocuments>& rows, int64_t ranks);
StepBatch make_rows(const std::vector<RowDocuments>& rows, const PackTarget& target, const PackOptions& options);

// All of a step's rows. Reads the documents' states (throws on damage, and on NaN or infinity, naming sample, token and column).
StepBatch make_step_batch(const std::vector<Dataset::Draw>& documents, const PackTarget& target, const PackOptions& options);

}  // namespace dspark::train
