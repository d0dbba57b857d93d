#include "job/eval.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/error.h"
#include "core/log.h"
#include "core/stop.h"
#include "formats/loss_mask.h"
#include "formats/rows.h"
#include "job/fit.h"
#include "model/drafter_files.h"
#include "spec/statistics.h"
#include "train/init.h"

namespace dspark::job {

using namespace spec;

namespace {

struct LoadedDrafter {
  fs::path path;
  model::DrafterFiles files;
  std::unique_ptr<model::Drafter> drafter;
  std::unique_ptr<Decoder> decoder;
};

LoadedDrafter load(const fs::path& path, target::TargetModel& model, const target::TargetFiles& files, int64_t capacity) {
  LoadedDrafter d{path, open_drafter(path), nullptr, nullptr};
  require_fit(d.files, files);
  if (const std::string doubt = model::rotary_doubt(d.files.config); !doubt.empty()) log_warn("{}: {}; decoding as servers do", path.string(), doubt);
  d.drafter = std::make_unique<model::Drafter>(model.context(), d.files.config, model::DrafterOptions{.trainable = false});
  model::load_drafter(*d.drafter, d.files, train::target_values(files, d.files.kept));
  d.decoder = std::make_unique<Decoder>(model, *d.drafter, d.files.kept, capacity);
  return d;
}

// What cannot be decoded is said of the two that tried.
template <typename F>
Decoded decode(const target::TargetFiles& files, LoadedDrafter& d, const F& run) {
  try {
    return run(*d.decoder);
  } catch (const Error& e) {
    throw Error(fmt::format("{} with {}: {}", files.path().string(), d.path.string(), e.what()), e.code());
  }
}

struct TaskPrompt {
  size_t task;
  std::vector<int32_t> ids;
};

constexpr int64_t kSlack = 64;  // positions that the last rounds may look ahead

std::vector<int32_t> prompt_of(const std::string& text, const target::TargetFiles& files) {
  return formats::prompt_ids(OrderedJson::array({OrderedJson{{"role", "user"}, {"content", text}}}), nullptr, files.render(), files.tokenizer());
}

void require_room(const std::string& where, const std::vector<int32_t>& prompt, const EvalOptions& o) {
  const int64_t wanted = static_cast<int64_t>(prompt.size()) + o.max_new_tokens + kSlack;
  DS_REQUIRE(wanted <= o.max_length, "{}: its prompt has {} tokens, with --max-new-tokens {} it needs --max-length {} (is {})", where, prompt.size(), o.max_new_tokens, wanted, o.max_length);
}

std::vector<TaskPrompt> read_tasks(const EvalOptions& o, const target::TargetFiles& files) {
  std::vector<TaskPrompt> prompts;
  for (size_t task = 0; task < o.data.size(); ++task) {
    formats::RowReport report;
    formats::RowReader reader({o.data[task]}, {.strict = true}, report);
    int64_t n = 0;
    while (auto row = reader.next()) {
      if (o.limit > 0 && n >= o.limit) break;
      const std::string text = formats::first_user_turn(*row);
      DS_REQUIRE(!text.empty(), "{}: no user turn to answer", row->where);
      prompts.push_back({task, prompt_of(text, files)});
      require_room(row->where, prompts.back().ids, o);
      ++n;
    }
    DS_REQUIRE(n > 0, "{} holds no prompt", o.data[task].string());
  }
  return prompts;
}

OrderedJson interval_json(const Interval& i) { return OrderedJson::array({i.low, i.high}); }

OrderedJson stats_json(std::span<const PromptStats> prompts, uint64_t seed, bool plain) {
  const PromptStats t = total(prompts);
  const Interval length = accepted_length(prompts, seed);
  auto prefix = OrderedJson::array(), conditional = OrderedJson::array();
  for (size_t k = 0; k < t.proposed.size(); ++k) {
    prefix.push_back(t.proposed[k] > 0 ? static_cast<double>(t.accepted[k]) / static_cast<double>(t.proposed[k]) : 0.0);
    const int64_t before = k == 0 ? t.proposed[0] : t.accepted[k - 1];
    conditional.push_back(before > 0 ? static_cast<double>(t.accepted[k]) / static_cast<double>(before) : 0.0);
  }
  OrderedJson j{{"prompts", prompts.size()}, {"rounds", t.rounds}, {"rounds_cut", t.cut}, {"tokens", t.tokens}, {"accepted_length", length.mean}, {"ci95", interval_json(length)},
                {"prefix_acceptance", prefix}, {"conditional_acceptance", conditional}, {"tokens_per_s", t.seconds > 0 ? static_cast<double>(t.tokens) / t.seconds : 0.0}};
  if (plain && t.plain_seconds > 0 && t.plain_tokens > 0) {
    const double with = static_cast<double>(t.tokens) / t.seconds, without = static_cast<double>(t.plain_tokens) / t.plain_seconds;
    j["tokens_per_s_without"] = without, j["speedup"] = with / without;
    // Seconds a round over seconds a plain token: the accepted length at which drafting pays.
    j["break_even_length"] = (t.seconds / static_cast<double>(std::max<int64_t>(t.rounds + t.cut, 1))) * without;
  }
  return j;
}

void print_table(const std::string& name, const OrderedJson& j) {
  fmt::print("{:<24} accepted length {:.3f} [{:.3f}, {:.3f}] in {} rounds, {} tokens\n", name, j["accepted_length"].get<double>(), j["ci95"][0].get<double>(), j["ci95"][1].get<double>(),
             j["rounds"].get<int64_t>(), j["tokens"].get<int64_t>());
  std::string line = "  accepted up to position ";
  for (const auto& v : j["prefix_acceptance"]) line += fmt::format(" {:.3f}", v.get<double>());
  fmt::print("{}\n", line);
  if (j.contains("speedup")) {
    const double break_even = j["break_even_length"].get<double>();  // an accepted length is never below 1
    fmt::print("  {:.1f} tokens/s with, {:.1f} without drafting: {:.2f}x; {}\n", j["tokens_per_s"].get<double>(), j["tokens_per_s_without"].get<double>(), j["speedup"].get<double>(),
               break_even > 1 ? fmt::format("drafting pays here above an accepted length of {:.2f}", break_even) : "drafting pays here at any accepted length");
  }
  if (j.contains("match_greedy")) fmt::print("  greedy output equals plain decoding on {} of {} prompts\n", j["match_greedy"].get<int64_t>(), j["prompts"].get<int64_t>());
}

// The folder's own name, as shells complete it ("run/") too.
std::string name_of(const fs::path& drafter) { return drafter.has_filename() ? drafter.filename().string() : drafter.parent_path().filename().string(); }

// Streams one answer, unless it is `quiet`; accepted tokens in green on a terminal.
struct Shown {
  std::string answer;
  PromptStats stats;
};
Shown show(LoadedDrafter& d, const target::TargetFiles& files, const std::vector<int32_t>& prompt, DecodeOptions options, bool quiet) {
  Shown shown;
  const bool colour = ::isatty(1) == 1;
  formats::StreamDecoder stream(files.tokenizer());
  auto put = [&](int32_t token, bool accepted) {
    const std::string text = stream.push(token);
    shown.answer += text;
    if (!quiet) fmt::print("{}{}{}", colour && accepted ? "\033[32m" : "", text, colour && accepted ? "\033[0m" : "");
  };
  options.on_first = [&](int32_t token) { put(token, false); };
  const Decoded out = decode(files, d, [&](Decoder& decoder) {
    return decoder.speculative(prompt, options, [&](const Round& r) {
      for (size_t i = 0; i < r.tokens.size(); ++i) put(r.tokens[i], static_cast<int64_t>(i) < r.accepted);
      std::fflush(stdout);
      return !stop_requested();
    });
  });
  const PromptStats s = prompt_stats(out, d.files.config.proposals());
  const std::string rest = stream.finish();
  shown.answer += rest;
  shown.stats = s;
  if (!quiet) fmt::print("{}\n", rest);
  std::fflush(stdout);  // before the line on stderr
  log_info("{} tokens in {} rounds, accepted length {:.2f}, {:.1f} tokens/s", s.tokens, s.rounds + s.cut, s.accepted_length(), s.seconds > 0 ? static_cast<double>(s.tokens) / s.seconds : 0.0);
  return shown;
}

// The next line that somebody types; none at the end of the input, or on a stop request.
std::optional<std::string> typed_line() {
  fmt::print("> ");
  std::fflush(stdout);
  pollfd input{0, POLLIN, 0};
  while (std::cin.rdbuf()->in_avail() <= 0 && ::poll(&input, 1, 200) <= 0)
    if (stop_requested()) return std::nullopt;
  std::string line;
  if (!std::getline(std::cin, line) || stop_requested()) return std::nullopt;
  return line;
}

void chat(LoadedDrafter& d, const target::TargetFiles& files, const EvalOptions& o, DecodeOptions decode) {
  OrderedJson messages = OrderedJson::array();
  for (; const auto line = typed_line(); ++decode.stream) {
    messages.push_back(OrderedJson{{"role", "user"}, {"content", *line}});
    const auto prompt = formats::prompt_ids(messages, nullptr, files.render(), files.tokenizer());
    decode.max_new_tokens = std::min(o.max_new_tokens, o.max_length - static_cast<int64_t>(prompt.size()) - kSlack);
    DS_REQUIRE(decode.max_new_tokens > 0, "the conversation has {} tokens, which leaves no room for an answer in --max-length {}", prompt.size(), o.max_length);
    messages.push_back(OrderedJson{{"role", "assistant"}, {"content", show(d, files, prompt, decode, false).answer}});
  }
}

}  // namespace

void run_eval(const EvalOptions& o) {
  if (o.target.empty()) fail_usage("eval needs --target");
  if (o.drafters.empty()) fail_usage("eval needs --drafter");
  if (o.data.empty() && o.prompt.empty() && !o.chat) fail_usage("eval needs --data TASK.jsonl, --prompt TEXT or --chat");
  if (o.temperature < 0) fail_usage("--temperature {}: 0 (greedy) or more", o.temperature);
  if (o.max_new_tokens < 1) fail_usage("--max-new-tokens {}: at least 1", o.max_new_tokens);
  if (!o.prompt.empty() + o.chat + !o.data.empty() > 1) fail_usage("--data, --prompt and --chat: one at a time");
  if (o.data.empty() && o.drafters.size() > 1) fail_usage("{} drafters: --data compares them, --prompt and --chat take one", o.drafters.size());
  if (o.chat && !o.common.json.empty()) fail_usage("--chat has no result for --json");
  std::vector<fs::path> inputs = o.data;
  inputs.insert(inputs.end(), o.drafters.begin(), o.drafters.end());
  inputs.push_back(o.target);
  require_apart("--json", o.common.json, inputs);
  const target::TargetFiles files(o.target);
  int64_t widest = files.config().head_dim;
  for (const auto& path : o.drafters) {
    const model::DrafterFiles drafter = open_drafter(path);
    require_fit(drafter, files);
    widest = std::max(widest, drafter.config.head_dim);
  }
  const auto tasks = o.data.empty() ? std::vector<TaskPrompt>{} : read_tasks(o, files);
  const auto prompt = o.prompt.empty() ? std::vector<int32_t>{} : prompt_of(o.prompt, files);
  if (!prompt.empty()) require_room("--prompt", prompt, o);
  JsonLines json(o.common.json);
  auto backend = make_job_backend(o.common);
  require_heads(*backend, widest, "the target or a drafter");
  if (o.common.dry_run) {
    log_info("dry run: {} drafters fit {}, {} prompts", o.drafters.size(), files.name(), tasks.size());
    json.write(OrderedJson{{"drafters", o.drafters.size()}, {"prompts", tasks.size()}});
    return json.finish();
  }
  target::TargetModel model(backend->context(), files.config(), files.loader());
  std::vector<LoadedDrafter> drafters;
  for (const auto& path : o.drafters) drafters.push_back(load(path, model, files, o.max_length));
  DecodeOptions d;
  d.sampling = {o.temperature, o.top_k, o.top_p, o.min_p};
  d.max_new_tokens = o.max_new_tokens;
  d.seed = o.common.seed;
  d.end_tokens = files.tokenizer().end_tokens();

  if (!o.prompt.empty()) {
    const Shown shown = show(drafters.front(), files, prompt, d, o.common.json == "-");
    const PromptStats& s = shown.stats;
    if (stop_requested()) stopped("the answer ends here");
    json.write(OrderedJson{{"drafter", o.drafters.front().string()}, {"answer", shown.answer}, {"tokens", s.tokens}, {"rounds", s.rounds + s.cut}, {"accepted_length", s.accepted_length()},
                           {"tokens_per_s", s.seconds > 0 ? static_cast<double>(s.tokens) / s.seconds : 0.0}});
    return json.finish();
  }
  if (o.chat) return chat(drafters.front(), files, o, d);

  log_info("{} prompts, {} drafters, temperature {}; {}", tasks.size(), drafters.size(), o.temperature, backend->describe());
  std::vector<std::vector<PromptStats>> stats(drafters.size());
  std::vector<int64_t> match(drafters.size(), 0);
  Progress progress("eval", tasks.size(), "prompts");
  const auto go_on = [] { return !stop_requested(); };
  const auto stop_here = [&] {  // between two tokens as between two prompts
    if (!go_on()) stopped("nothing is written by an eval that did not finish");
  };
  for (size_t i = 0; i < tasks.size(); ++i) {
    stop_here();
    const std::vector<int32_t>& ids = tasks[i].ids;
    d.stream = i;
    Decoded plain;
    if (o.plain) plain = decode(files, drafters.front(), [&](Decoder& decoder) { return decoder.plain(ids, d, go_on); });
    stop_here();
    for (size_t k = 0; k < drafters.size(); ++k) {
      const Decoded out = decode(files, drafters[k], [&](Decoder& decoder) { return decoder.speculative(ids, d, [&](const Round&) { return go_on(); }); });
      stop_here();
      PromptStats s = prompt_stats(out, drafters[k].files.config.proposals());
      s.plain_seconds = plain.seconds;
      s.plain_tokens = std::max<int64_t>(0, static_cast<int64_t>(plain.tokens.size()) - 1);
      match[k] += out.tokens == plain.tokens ? 1 : 0;
      stats[k].push_back(std::move(s));
    }
    progress.update(i + 1);
  }
  progress.finish();

  auto result_of = [&](size_t k) {
    auto list = OrderedJson::array();
    for (size_t t = 0; t < o.data.size(); ++t) {
      std::vector<PromptStats> part;
      for (size_t i = 0; i < tasks.size(); ++i)
        if (tasks[i].task == t) part.push_back(stats[k][i]);
      OrderedJson j{{"task", o.data[t].string()}};
      j.update(stats_json(part, o.common.seed, o.plain));
      list.push_back(j);
    }
    OrderedJson all = stats_json(stats[k], o.common.seed, o.plain);
    if (o.plain && o.temperature < 1e-5) all["match_greedy"] = match[k];
    return OrderedJson{{"drafter", o.drafters[k].string()}, {"temperature", o.temperature}, {"tasks", list}, {"total", all}};
  };
  OrderedJson result = result_of(0);
  print_table(name_of(o.drafters[0]), result["total"]);
  if (drafters.size() > 1) {
    result["compared"] = OrderedJson::array();
    for (size_t k = 1; k < drafters.size(); ++k) {
      OrderedJson other = result_of(k);
      const Interval difference = paired_difference(stats[0], stats[k], o.common.seed);
      other["paired_difference"] = OrderedJson{{"mean", difference.mean}, {"ci95", interval_json(difference)}};
      print_table(name_of(o.drafters[k]), other["total"]);
      fmt::print("  {} - {}, paired by prompt: {:+.3f} [{:+.3f}, {:+.3f}]\n", name_of(o.drafters[0]), name_of(o.drafters[k]), difference.mean, difference.low, difference.high);
      result["compared"].push_back(other);
    }
  }
  result["peak_rss_bytes"] = peak_rss_bytes();
  json.write(result);
  json.finish();
}

}  // namespace dspark::job
