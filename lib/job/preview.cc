#include "job/preview.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/log.h"
#include "formats/loss_mask.h"
#include "formats/rows.h"
#include "target/target_files.h"

namespace dspark::job {

using namespace formats;

namespace {

struct Segment {
  std::string text;
  bool in_loss;
};

std::vector<Segment> segments_of(const TokenRow& row, const Tokenizer& tokenizer) {
  std::vector<Segment> out;
  for (size_t begin = 0, end; begin < row.ids.size(); begin = end) {
    end = begin;
    while (end < row.ids.size() && row.mask[end] == row.mask[begin]) ++end;
    out.push_back({tokenizer.decode(std::span(row.ids).subspan(begin, end - begin)), row.mask[begin] != 0});
  }
  return out;
}

// The rows a line becomes; what the target is to answer is one row without the answer.
std::vector<TokenRow> rows_of(const Row& row, const target::TargetFiles& files, const ExtractOptions& o, RowReport& report) {
  const auto question = question_of(row, files, o, report);
  if (!question) return make_token_rows(row, files.tokenizer(), files.render(), {.max_length = o.max_length, .strict = o.strict}, report);
  if (question->ids.empty()) return {};
  TokenRow prompt;
  prompt.where = row.where + ", for the target to answer (--regenerate)";
  prompt.ids = question->ids;
  prompt.mask.assign(prompt.ids.size(), 0);
  return {prompt};
}

}  // namespace

void preview_rows(const ExtractOptions& o, int64_t n) {
  std::vector<fs::path> inputs = o.data;
  inputs.push_back(o.target);
  require_apart("--json", o.common.json, inputs);
  const target::TargetFiles files(o.target);
  RowReport report;
  RowReader reader(o.data, {.strict = o.strict}, report);
  JsonLines json(o.common.json);
  const bool colour = ::isatty(1) == 1, text = o.common.json != "-";
  int64_t shown = 0;
  while (shown < n) {
    const auto row = reader.next();
    if (!row) break;
    for (const TokenRow& t : rows_of(*row, files, o, report)) {
      const auto segments = segments_of(t, files.tokenizer());
      const auto in_loss = std::count(t.mask.begin(), t.mask.end(), 1);
      OrderedJson line{{"where", t.where}, {"tokens", t.ids.size()}, {"loss_tokens", in_loss}, {"segments", OrderedJson::array()}};
      for (const Segment& s : segments) line["segments"].push_back(OrderedJson{{"text", s.text}, {"in_loss", s.in_loss}});
      json.write(line);
      if (text) {
        fmt::print("{}{} ({} tokens, {} in the loss)\n", shown > 0 ? "\n" : "", printable(t.where), t.ids.size(), in_loss);
        for (const Segment& s : segments) {
          if (!s.in_loss) fmt::print("{}", printable(s.text));
          else fmt::print("{}{}{}", colour ? "\033[32m" : "[[", printable(s.text), colour ? "\033[0m" : "]]");
        }
        fmt::print("\n");
      }
      if (++shown >= n) break;
    }
  }
  json.finish();
  fmt::print(stderr, "{}", printable(report.table()));
  DS_REQUIRE(shown > 0, "{}: no row to show in {} lines", o.data.front().string(), report.lines);
}

}  // namespace dspark::job
