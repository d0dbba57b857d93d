// The generating stages of extract: questions that the target writes itself, and its answers.
#pragma once

#include <vector>

#include "formats/loss_mask.h"
#include "formats/sample_source.h"
#include "job/extract.h"
#include "target/target_files.h"
#include "target/target_model.h"

namespace dspark::job {

struct Question {
  uint64_t id = 0;       // also the substream of its random numbers
  std::string text;
};

// A token row that is ready for the states stage.
struct AnsweredRow {
  formats::TokenRow row;
  formats::FinishReason finish = formats::FinishReason::given;
};

// `n` distinct questions (by normalised text), continuing from OUT/questions.jsonl. Throws Error 75 when stopped.
std::vector<Question> write_questions(target::TargetModel& model, const target::TargetFiles& files, const ExtractOptions& options, int64_t n);

// The target's answer to each question, continuing from OUT/answers.jsonl: prompt and answer as one token row, the answer with its
// end token in the loss. Answers cut by the limit are kept or dropped (--on-length).
std::vector<AnsweredRow> write_answers(target::TargetModel& model, const target::TargetFiles& files, const ExtractOptions& options,
                                       const std::vector<Question>& questions);

// Lower case, runs of white space and punctuation folded: what makes two questions the same.
std::string normalised_question(const std::string& text);

}  // namespace dspark::job
