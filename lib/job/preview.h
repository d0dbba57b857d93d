// --preview: rows as the trainer will see them, their text with what is in the loss.
#pragma once

#include "job/extract.h"

namespace dspark::job {

// Prints the first n token rows of --data: what is in the loss in colour on a terminal, in [[ ]] elsewhere; with --json a line a row.
// Prompts have no answer yet: they are shown as the target will get them, nothing of them in the loss.
void preview_rows(const ExtractOptions& options, int64_t n);

}  // namespace dspark::job
