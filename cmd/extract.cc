#include "job/extract.h"

#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/error.h"
#include "core/log.h"
#include "job/preview.h"
#include "job/store_tools.h"

namespace dspark::cmd {
namespace {

struct Options {
  job::ExtractOptions extract;
  fs::path inspect, verify;
  std::vector<fs::path> merge;
  std::optional<int64_t> preview;
};

void verify(const Options& o) {
  job::JsonLines json(o.extract.common.json);
  const auto check = job::verify_store(o.verify);
  for (const auto* list : {&check.problems, &check.not_finite})
    for (const auto& p : *list) fmt::print(stderr, "{}\n", printable(p.text()));
  json.write(OrderedJson{{"store", o.verify.string()}, {"samples", check.samples}, {"bytes", check.bytes}, {"problems", check.problems.size()},
                         {"not_finite", check.not_finite.size()}, {"complete", check.complete}});
  json.finish();
  fmt::print(stderr, "{}: {} samples, {} bytes read, {} problems, {} samples that are not finite\n", o.verify.string(), check.samples, check.bytes, check.problems.size(), check.not_finite.size());
  DS_REQUIRE(check.problems.empty() && check.not_finite.empty(), "{} is damaged: {}", o.verify.string(), job::how_to_mend(o.verify));
}

// One thing at a time: what would be passed over in silence is wrong usage.
void require_one(const Options& o) {
  const auto& e = o.extract;
  const std::pair<const char*, bool> looks[] = {{"--inspect", !o.inspect.empty()}, {"--verify", !o.verify.empty()}, {"--merge", !o.merge.empty()}, {"--preview", o.preview.has_value()}};
  std::string one;
  for (const auto& [name, asked] : looks) {
    if (!asked) continue;
    if (!one.empty()) fail_usage("{} and {}: one at a time", one, name);
    one = name;
  }
  if (!one.empty() && e.synthesize > 0) fail_usage("{} and --synthesize: one at a time", one);
  if (!one.empty() && one != "--preview" && !e.data.empty()) fail_usage("{} takes no --data", one);
  if (one == "--merge" && e.common.dry_run) fail_usage("--merge has no --dry-run; --verify reads a store without writing");
  if (e.regenerate && e.data.empty()) fail_usage("--regenerate answers rows of --data; --synthesize answers its own questions anyway");
  if (!e.hold_out_file.empty() && e.hold_out <= 0) fail_usage("--hold-out-file needs --hold-out N");
}

void run(const Options& o) {
  require_one(o);
  std::vector<fs::path> looked_at = o.merge;
  for (const fs::path& p : {o.inspect, o.verify}) looked_at.push_back(p);
  job::require_apart("--json", o.extract.common.json, looked_at);
  if (!o.inspect.empty()) {
    job::JsonLines json(o.extract.common.json);
    const Json j = job::inspect_store(o.inspect);
    json.write(OrderedJson(j));
    json.finish();
    if (o.extract.common.json != "-") fmt::print("{}", printable(job::store_table(j)));
  } else if (!o.verify.empty()) {
    verify(o);
  } else if (!o.merge.empty()) {
    if (o.extract.out.empty()) fail_usage("--merge needs --out STORE");
    job::require_outside_stores(o.extract.out, true);
    job::JsonLines json(o.extract.common.json);
    const auto r = job::merge_stores(o.merge, o.extract.out, formats::codec_from_name(o.extract.codec), {.taps = job::tap_numbers(o.extract.taps)});
    for (const auto& p : r.problems) fmt::print(stderr, "left out: {}\n", printable(p.text()));
    fmt::print(stderr, "{}: {} samples, {} added, {} duplicates\n", o.extract.out.string(), r.samples, r.added, r.duplicates);
    json.write(OrderedJson{{"store", o.extract.out.string()}, {"samples", r.samples}, {"added", r.added}, {"duplicates", r.duplicates}, {"left_out", r.problems.size()}});
    json.finish();
  } else if (o.preview) {
    if (o.extract.target.empty() || o.extract.data.empty()) fail_usage("--preview needs --target and --data");
    job::preview_rows(o.extract, *o.preview);
  } else {
    job::run_extract(o.extract);
  }
}

}  // namespace

void add_extract(CLI::App& app) {
  auto o = std::make_shared<Options>();
  auto& e = o->extract;
  CLI::App* sub = app.add_subcommand("extract", "conversations or prompts -> token rows, answers, hidden states in a store");
  sub->add_option("--target", e.target, "Hugging Face folder or .gguf file")->type_name("TARGET");
  sub->add_option("--data", e.data, "rows: JSON lines with messages, conversations, turns, prompt/response or input_ids")->type_name("ROWS.jsonl");
  sub->add_option("--synthesize", e.synthesize, "no data: the target writes N conversations itself (Magpie)")->type_name("N");
  sub->add_flag("--regenerate", e.regenerate, "let the target answer the rows' first user turns");
  sub->add_option("--out", e.out, "the store's folder; the same identity resumes")->type_name("STORE");
  sub->add_option("--taps", e.taps, "auto, or layer numbers n (the state after n layers): 2,10,18")->capture_default_str();
  sub->add_option("--max-length", e.max_length, "tokens of a row; longer rows are cut")->capture_default_str();
  sub->add_option("--max-new-tokens", e.max_new_tokens, "tokens of an answer")->capture_default_str();
  sub->add_option("--question-tokens", e.question_tokens, "of a question that --synthesize lets the target write; one without an end by then is left out")->capture_default_str();
  sub->add_option("--temperature", e.temperature, "of generated questions and answers; 0 is greedy")->capture_default_str();
  sub->add_option("--top-p", e.top_p, "nucleus of generated text")->capture_default_str();
  sub->add_option("--on-length", e.on_length, "answers cut by --max-new-tokens: keep or drop")->capture_default_str();
  sub->add_option("--batch", e.batch, "sequences generated at once")->capture_default_str();
  sub->add_option("--codec", e.codec, "raw, zstd (lossless) or fp8 (lossy)")->capture_default_str();
  sub->add_option("--limit", e.limit, "use at most this many rows (0: all)")->capture_default_str();
  sub->add_flag("--strict", e.strict, "what would be counted and dropped is an error that names the line");
  sub->add_option("--hold-out", e.hold_out, "with --synthesize: N more questions, never in the store ...")->type_name("N");
  sub->add_option("--hold-out-file", e.hold_out_file, "... written here as an eval task")->type_name("TASK.jsonl");
  sub->add_option("--inspect", o->inspect, "what a store holds")->type_name("STORE");
  sub->add_option("--verify", o->verify, "read every block of a store and check it")->type_name("STORE");
  sub->add_option("--merge", o->merge, "stores of one identity into --out")->type_name("STORE");
  sub->add_option("--preview", o->preview, "show the first N rows of --data as text, the loss mask in colour")->type_name("N");
  add_common(*sub, e.common);
  sub->callback([o] { run(*o); });
}

}  // namespace dspark::cmd
