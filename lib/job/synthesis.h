// What a store remembers of the text its target wrote, questions or answers (OUT/synthesis.json): how, and which questions were held
// out. A run that goes on keeps both: a question is never held out and trained on, and one store holds one way of answering.
#pragma once

#include <set>
#include <vector>

#include "job/answers.h"

namespace dspark::job {

class Synthesis {
 public:
  // Reads the record where there is one; throws when it was made with other settings, naming them.
  explicit Synthesis(const ExtractOptions& options);

  // How many questions split() wants.
  int64_t wanted() const;
  struct Split {
    std::vector<Question> training, held;
  };
  // The first --synthesize questions that are not held out, and --hold-out others: those of before first, then the last ones that
  // were never trained on. Writes the record.
  Split split(const std::vector<Question>& questions);

 private:
  const ExtractOptions& options_;
  std::set<uint64_t> training_, held_;
};

}  // namespace dspark::job
