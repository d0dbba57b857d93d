#include "job/extract.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/stop.h"
#include "formats/rows.h"
#include "formats/store.h"
#include "job/answers.h"
#include "job/fit.h"
#include "job/store_tools.h"
#include "job/synthesis.h"
#include "target/prefill.h"

namespace dspark::job {

using namespace formats;

namespace {

uint64_t sample_id(const std::string& hex) { return std::stoull(hex, nullptr, 16); }

StoreIdentity make_identity(const target::TargetFiles& files, const std::vector<model::TapLayer>& taps, const ExtractOptions& o) {
  StoreIdentity id;
  id.target = files.name();
  id.config_hash = files.config_hash();
  id.tokenizer_hash = files.tokenizer().identity();
  id.target_quantisation = files.quantisation();
  for (const auto& t : taps) id.taps.push_back(t.n);
  id.last_state = LastState::pre_norm;
  id.hidden_size = files.config().hidden;
  id.vocab_size = files.config().vocab;
  id.codec = codec_from_name(o.codec);
  id.extra["precision"] = o.common.precision;
  id.extra["weights"] = files.weights_hash();
  return id;
}

// Rows of files: conversations become token rows, prompts become questions to answer.
struct GatheredRows {
  std::vector<AnsweredRow> rows;
  std::vector<Question> questions;
};

GatheredRows gather_rows_of(const ExtractOptions& o, const target::TargetFiles& files, RowReport& report) {
  GatheredRows out;
  if (o.data.empty()) return out;
  RowReader reader(o.data, {.strict = o.strict}, report);
  MaskOptions mask{.max_length = o.max_length, .strict = o.strict};
  const Render render = files.has_chat_template() ? files.render() : Render([&](const OrderedJson&, const OrderedJson*, bool) -> std::string {
    fail("{} carries no chat template: give rows with input_ids and loss_mask", files.path().string());
  });
  while (auto row = reader.next()) {
    if (o.limit > 0 && static_cast<int64_t>(out.rows.size() + out.questions.size()) >= o.limit) break;
    if (const auto question = question_of(*row, files, o, report)) {
      DS_REQUIRE(o.regenerate, "{}: a row of prompts has no answers; add --regenerate to let the target answer", row->where);
      if (!question->ids.empty()) out.questions.push_back({sample_id(sha256_hex(question->text).substr(0, 16)), question->text});
      continue;
    }
    for (TokenRow& t : make_token_rows(*row, files.tokenizer(), render, mask, report)) out.rows.push_back({std::move(t), FinishReason::given});
  }
  return out;
}

bool has_label(const TokenRow& row) { return std::find(row.mask.begin(), row.mask.end(), 1) != row.mask.end(); }

// A store without a sample is no result: throws, and says what became of the rows.
void require_labels(const std::vector<AnsweredRow>& rows, const RowReport& report, const ExtractOptions& o) {
  if (std::any_of(rows.begin(), rows.end(), [](const AnsweredRow& r) { return has_label(r.row); })) return;
  std::string why, files;
  const auto add = [&why](uint64_t n, const std::string& what) {
    if (n > 0) why += fmt::format("{}{} {}", why.empty() ? ": " : ", ", n, what);
  };
  for (const auto& [reason, count] : report.dropped) add(count.count, fmt::format("as {}", count.first));
  add(rows.size(), "without a token in the loss");
  const uint64_t asked = report.used + static_cast<uint64_t>(o.synthesize);
  if (o.on_length == "drop" && asked > rows.size()) add(asked - rows.size(), "answers cut by --max-new-tokens and dropped by --on-length");
  for (const fs::path& file : o.data) files += (files.empty() ? "" : ", ") + file.string();
  fail("{}: nothing to extract in {} lines{}; no store is written", files.empty() ? "--synthesize" : files, report.lines, why);
}

void write_hold_out(const fs::path& path, const std::vector<Question>& questions) {
  std::string text;
  for (const Question& q : questions) text += OrderedJson{{"turns", OrderedJson::array({q.text})}}.dump() + "\n";
  write_text_atomic(path, text);
}

struct StateCounts {
  int64_t stored = 0, present = 0, duplicate = 0, empty = 0;
};

StateCounts write_states(target::TargetModel& model, const std::vector<AnsweredRow>& rows, const std::vector<int>& taps,
                         StoreWriter& writer, int64_t max_length) {
  StateCounts counts;
  target::Prefill prefill(model, taps, max_length);
  const auto done_before = writer.done();
  uint64_t tokens = 0, total_tokens = 0;
  for (const auto& r : rows) total_tokens += r.row.ids.size();
  Progress progress("states", total_tokens, "tokens");
  double last_checkpoint = now_s();
  for (const AnsweredRow& r : rows) {
    if (stop_requested()) {
      writer.checkpoint();
      stopped("finished samples are kept; start the same command again to go on");
    }
    const uint64_t id = sample_id(r.row.id);
    tokens += r.row.ids.size();
    if (!has_label(r.row)) {
      ++counts.empty;
      continue;
    }
    if (writer.done().contains(id)) {
      ++(done_before.contains(id) ? counts.present : counts.duplicate);
      continue;
    }
    const std::vector<bf16> states = prefill.run(r.row.ids);
    const auto width = static_cast<int64_t>(states.size() / r.row.ids.size());
    if (const auto bad = first_non_finite(states.data(), static_cast<int64_t>(r.row.ids.size()), width, width))
      fail("{}: the target's state of token {} is {} (column {}); the weights or the file are damaged", r.row.where, bad->row, bad->value, bad->column);
    writer.append(encode_record(writer.format(), {.id = id, .token_ids = r.row.ids, .loss_mask = r.row.mask, .finish = r.finish, .states = states.data(), .row_stride = width, .conversation = r.row.conversation}));
    ++counts.stored;
    progress.update(tokens);
    if (now_s() - last_checkpoint > 20) {
      writer.checkpoint();
      last_checkpoint = now_s();
    }
  }
  progress.finish();
  return counts;
}

// What can be said of --out without touching it: whether this command could go on there.
void check_could_resume(const ExtractOptions& o, const StoreIdentity& identity) {
  if (!fs::exists(o.out) || !is_store(o.out)) return;
  const std::string difference = identity_difference(identity, open_store(o.out)->identity());
  DS_REQUIRE(difference.empty(), "{} holds a store of something else ({}); choose another output or remove it", o.out.string(), difference);
}

}  // namespace

std::optional<RowQuestion> question_of(const Row& row, const target::TargetFiles& files, const ExtractOptions& o, RowReport& report) {
  if (row.kind != Row::Kind::prompts && !(o.regenerate && row.kind == Row::Kind::conversation)) return std::nullopt;
  RowQuestion q{first_user_turn(row), {}};
  const auto drop = [&](const std::string& reason, const std::string& detail) {
    count_reason(report.dropped[reason], o.strict, row.where, reason, detail);
    q.ids.clear();
    return q;
  };
  if (q.text.empty()) return drop("no user turn", "nothing to answer");
  q.ids = prompt_ids(OrderedJson::array({OrderedJson{{"role", "user"}, {"content", q.text}}}), nullptr, files.render(), files.tokenizer());
  if (static_cast<int64_t>(q.ids.size()) >= o.max_length) return drop("no room for an answer", fmt::format("a prompt of {} tokens, --max-length {}", q.ids.size(), o.max_length));
  ++report.used, ++report.prompts;
  return q;
}

void run_extract(const ExtractOptions& o) {
  if (o.target.empty()) fail_usage("extract needs --target");
  if (o.data.empty() && o.synthesize <= 0) fail_usage("extract needs --data FILE.jsonl or --synthesize N");
  if (o.out.empty()) fail_usage("extract needs --out STORE");
  if (o.max_length < 8) fail_usage("--max-length {}: at least 8 tokens", o.max_length);
  if (o.on_length != "keep" && o.on_length != "drop") fail_usage("--on-length {}: keep or drop", o.on_length);
  if (o.hold_out > 0 && o.synthesize <= 0) fail_usage("--hold-out keeps questions back that --synthesize writes: it needs --synthesize N");
  if (o.hold_out > 0 && o.hold_out_file.empty()) fail_usage("--hold-out needs --hold-out-file");
  require_outside_stores(o.out, true);
  std::vector<fs::path> inputs = o.data;
  inputs.push_back(o.target);
  require_apart("--json", o.common.json, inputs);
  require_apart("--hold-out-file", o.hold_out_file, inputs);
  if (!o.hold_out_file.empty()) const AtomicFile probe(o.hold_out_file);  // gone again: it is not committed
  const double start = now_s();
  const target::TargetFiles files(o.target);
  const auto& config = files.config();
  const auto taps = parse_taps(o.taps, config.layers);
  const StoreIdentity identity = make_identity(files, taps, o);
  JsonLines json(o.common.json);
  RowReport report;
  GatheredRows gathered = gather_rows_of(o, files, report);
  if (o.synthesize == 0 && gathered.questions.empty()) require_labels(gathered.rows, report, o);
  auto backend = make_job_backend(o.common);
  require_heads(*backend, config.head_dim, files.name());
  log_info("target {}: {} layers, width {}, {}; {}", files.name(), config.layers, config.hidden, files.quantisation(), backend->describe());
  if (o.common.dry_run) {
    check_could_resume(o, identity);
    if (o.synthesize > 0 || !gathered.questions.empty()) const Synthesis same(o);
    std::string text = fmt::format("{} token rows, {} prompts to answer", gathered.rows.size(), gathered.questions.size());
    if (o.synthesize > 0) text += fmt::format(", {} conversations for the target to write", o.synthesize);
    if (o.hold_out > 0) text += fmt::format(", {} more questions held out", o.hold_out);
    log_info("dry run: {}; nothing is written", text);
    json.write(OrderedJson{{"rows", gathered.rows.size()}, {"prompts", gathered.questions.size()}, {"synthesize", o.synthesize}, {"hold_out", o.hold_out}});
    return json.finish();
  }
  StoreWriter writer(o.out, identity);
  if (writer.resumed()) log_info("{}: resuming, {} samples are there", o.out.string(), writer.totals().samples);
  for (const auto& p : writer.problems()) log_warn("{}: {}", o.out.string(), p.text());

  const bool generate = o.synthesize > 0 || !gathered.questions.empty();
  target::TargetModel model(backend->context(), config, files.loader());
  const double loaded_at = now_s();
  if (generate) {
    Synthesis synthesis(o);
    const auto [training, held] = synthesis.split(o.synthesize > 0 ? write_questions(model, files, o, synthesis.wanted()) : std::vector<Question>{});
    if (o.hold_out > 0) write_hold_out(o.hold_out_file, held);
    gathered.questions.insert(gathered.questions.end(), training.begin(), training.end());
  }
  const double generated_at = now_s();
  if (generate) {
    auto answered = write_answers(model, files, o, gathered.questions);
    gathered.rows.insert(gathered.rows.end(), std::make_move_iterator(answered.begin()), std::make_move_iterator(answered.end()));
  }
  const double answered_at = now_s();
  if (generate) require_labels(gathered.rows, report, o);
  std::vector<int> tap_numbers;
  for (const auto& t : taps) tap_numbers.push_back(t.n);
  const StateCounts counts = write_states(model, gathered.rows, tap_numbers, writer, o.max_length);
  writer.finish();

  const auto& totals = writer.totals();
  const double raw = static_cast<double>(totals.tokens) * (static_cast<double>(identity.row_width()) * 2 + 5);  // states, token id, loss mask
  if (report.lines > 0) fmt::print(stderr, "{}", printable(report.table()));
  log_info("{}: {} samples, {} tokens, {} in the loss; {} new, {} there already, {} duplicates, {} without a label", o.out.string(), totals.samples,
           totals.tokens, totals.mask_tokens, counts.stored, counts.present, counts.duplicate, counts.empty);
  log_info("{} on disk, codec {}, ratio {:.2f}; {} (loading {}, generating {}, states {})", format_bytes(static_cast<double>(totals.record_bytes)), o.codec,
           totals.record_bytes > 0 ? raw / static_cast<double>(totals.record_bytes) : 0.0, format_seconds(now_s() - start),
           format_seconds(loaded_at - start), format_seconds(answered_at - loaded_at), format_seconds(now_s() - answered_at));
  json.write(OrderedJson{{"store", o.out.string()}, {"samples", totals.samples}, {"tokens", totals.tokens}, {"loss_tokens", totals.mask_tokens},
                         {"new", counts.stored}, {"present", counts.present}, {"duplicates", counts.duplicate},
                         {"bytes", totals.record_bytes}, {"ratio", totals.record_bytes > 0 ? raw / static_cast<double>(totals.record_bytes) : 0.0},
                         {"lines", report.lines}, {"used", report.used}, {"dropped", report.dropped_lines()}, {"cut", report.cut.count},
                         {"seconds", now_s() - start}, {"load_seconds", loaded_at - start}, {"question_seconds", generated_at - loaded_at}, {"answer_seconds", answered_at - generated_at},
                         {"peak_rss_bytes", peak_rss_bytes()}});
  json.finish();
}

}  // namespace dspark::job
