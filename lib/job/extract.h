// extract: conversations, prompts or nothing at all -> token rows, answers, hidden states in a store.
//
// Three stages, each of which can be killed and started again:
//   questions   --synthesize: the target writes user turns itself (Magpie)          OUT/questions.jsonl
//   answers     --synthesize, --regenerate: the target answers                      OUT/answers.jsonl
//   states      every token row through the target                                  the store's shards
// The two journals are append-only and keyed by row id; the store knows which samples it holds.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "job/common.h"

namespace dspark::formats {
struct Row;
struct RowReport;
}  // namespace dspark::formats

namespace dspark::job {

struct ExtractOptions {
  CommonOptions common;
  fs::path target, out;
  std::vector<fs::path> data;
  int64_t synthesize = 0;
  bool regenerate = false;
  std::string taps = "auto";
  int64_t max_length = 2048, max_new_tokens = 512, question_tokens = 128, limit = 0;
  double temperature = 1.0, top_p = 1.0;
  std::string codec = "zstd", on_length = "keep";
  bool strict = false;
  int64_t hold_out = 0;          // --synthesize: this many more questions go to hold_out_file, never into the store
  fs::path hold_out_file;
  int64_t batch = 32;
};

void run_extract(const ExtractOptions& options);

// What the target is to be asked of a row: prompts always, a conversation with --regenerate. Rows with nothing to ask are counted as
// dropped (with --strict: an Error) and give no ids. None: the row is taken as it stands.
struct RowQuestion {
  std::string text;
  std::vector<int32_t> ids;  // as the target gets it
};
std::optional<RowQuestion> question_of(const formats::Row& row, const target::TargetFiles& files, const ExtractOptions& options, formats::RowReport& report);

}  // namespace dspark::job
