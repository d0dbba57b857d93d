#include "job/answers.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "core/error.h"
#include "core/log.h"
#include "core/stop.h"
#include "job/journal.h"
#include "target/generate.h"

namespace dspark::job {

using formats::FinishReason;

std::string normalised_question(const std::string& text) {
  std::string out;
  for (unsigned char c : text) {
    if (c >= 0x80 || std::isalnum(c)) out += static_cast<char>(std::tolower(c));
    else if (!out.empty() && out.back() != ' ') out += ' ';
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

namespace {

std::string trimmed(const std::string& s) {
  const auto begin = s.find_first_not_of(" \t\r\n"), end = s.find_last_not_of(" \t\r\n");
  return begin == std::string::npos ? "" : s.substr(begin, end - begin + 1);
}

target::GenerateOptions generate_options(const target::TargetFiles& files, const ExtractOptions& options) {
  target::GenerateOptions g;
  g.target = files.path().string();
  g.sampling.temperature = options.temperature;
  g.sampling.top_p = options.top_p;
  g.max_length = options.max_length;
  g.batch = options.batch;
  g.end_tokens = files.tokenizer().end_tokens();
  return g;
}

// The first n distinct questions in the order of their attempts: the same ones whatever order the attempts ended in, and however
// often the work was stopped. Fewer when there are fewer.
std::vector<Question> first_distinct(const std::map<uint64_t, std::string>& attempts, int64_t n) {
  std::vector<Question> questions;
  std::unordered_set<std::string> seen;
  for (const auto& [id, text] : attempts) {
    if (static_cast<int64_t>(questions.size()) >= n) break;
    if (!text.empty() && seen.insert(normalised_question(text)).second) questions.push_back({id, text});
  }
  return questions;
}

// What became of the attempts that are no question of their own.
std::string outcome(const std::map<uint64_t, std::string>& attempts, size_t distinct) {
  const auto empty = static_cast<size_t>(std::count_if(attempts.begin(), attempts.end(), [](const auto& a) { return a.second.empty(); }));
  return fmt::format("{} without an end in --question-tokens or of fewer than three words, {} said before", empty, attempts.size() - empty - distinct);
}

}  // namespace

std::vector<Question> write_questions(target::TargetModel& model, const target::TargetFiles& files, const ExtractOptions& options, int64_t n) {
  std::map<uint64_t, std::string> attempts;  // "": no question came of it
  std::unordered_set<std::string> distinct;
  const auto add = [&](uint64_t id, const std::string& text) {
    attempts.emplace(id, text);
    if (!text.empty()) distinct.insert(normalised_question(text));
  };
  Journal journal(options.out / "questions.jsonl", [&](const Json& line) { add(line.at("id").get<uint64_t>(), line.value("text", "")); });
  // Attempts that an earlier run did not end come first: what is chosen must not depend on where it stopped.
  const uint64_t begun = attempts.empty() ? 0 : attempts.rbegin()->first + 1;
  std::vector<uint64_t> open;
  DS_REQUIRE(begun < attempts.size() + 100000, "{}: attempt {} of {} is damaged, or not written by dspark; take the whole file away to begin anew",
             (options.out / "questions.jsonl").string(), begun - 1, attempts.size());
  for (uint64_t id = 0; id < begun; ++id)
    if (!attempts.contains(id)) open.push_back(id);
  const auto enough = [&] { return static_cast<int64_t>(distinct.size()) >= n; };
  if (!enough() || !open.empty()) {
    const auto& tokenizer = files.tokenizer();
    const auto prefix = tokenizer.encode(files.chat_template().user_prefix(files.chat_options()));
    target::GenerateOptions g = generate_options(files, options);
    g.seed = options.common.seed * 2 + 1;  // another stream than the answers'
    g.max_new_tokens = options.question_tokens;
    target::Generator generator(model, g);
    Progress progress("questions", static_cast<uint64_t>(n), "questions");
    size_t next_open = 0;
    uint64_t next_id = begun;
    const uint64_t last_allowed = next_id + static_cast<uint64_t>(20 * n + 1000);
    generator.run(
        [&](target::Prompt& prompt) {
          if (stop_requested()) return false;
          if (next_open < open.size()) {
            prompt = {open[next_open++], prefix};
            return true;
          }
          // Attempts in flight when enough are found are finished and kept.
          if (enough() || next_id >= last_allowed) return false;
          prompt = {next_id++, prefix};
          return true;
        },
        [&](target::Generated&& s) {
          std::string text;
          if (s.ended) {
            s.ids.pop_back();
            text = trimmed(tokenizer.decode(s.ids, true));
          }
          const std::string words = normalised_question(text);
          if (std::count(words.begin(), words.end(), ' ') < 2) text.clear();
          OrderedJson line{{"id", s.id}};
          if (!text.empty()) line["text"] = text;
          journal.append(line);
          add(s.id, text);
          progress.update(std::min(distinct.size(), static_cast<size_t>(n)));
          return !stop_requested();
        });
    progress.finish();
    if (stop_requested()) stopped("the questions written so far are kept; start the same command again to go on");
    DS_REQUIRE(enough(), "the target wrote only {} distinct questions in {} attempts ({}); raise --temperature, raise --question-tokens, or ask for fewer", distinct.size(), attempts.size(), outcome(attempts, distinct.size()));
  }
  log_info("questions: {} wanted, {} distinct ones of {} attempts ({})", n, distinct.size(), attempts.size(), outcome(attempts, distinct.size()));
  return first_distinct(attempts, n);
}

std::vector<AnsweredRow> write_answers(target::TargetModel& model, const target::TargetFiles& files, const ExtractOptions& options,
                                       const std::vector<Question>& questions) {
  std::unordered_map<uint64_t, std::pair<std::vector<int32_t>, bool>> answers;
  Journal journal(options.out / "answers.jsonl", [&](const Json& line) {
    answers[line.at("id").get<uint64_t>()] = {line.at("ids").get<std::vector<int32_t>>(), line.at("finish") == "stop"};
  });
  auto prompt_of = [&](const Question& q) {
    const OrderedJson messages = OrderedJson::array({OrderedJson{{"role", "user"}, {"content", q.text}}});
    return formats::prompt_ids(messages, nullptr, files.render(), files.tokenizer());
  };
  std::vector<const Question*> open;
  for (const Question& q : questions)
    if (!answers.contains(q.id)) open.push_back(&q);
  if (!open.empty()) {
    target::GenerateOptions g = generate_options(files, options);
    g.seed = options.common.seed * 2;
    g.max_new_tokens = options.max_new_tokens;
    target::Generator generator(model, g);
    Progress progress("answers", open.size(), "answers");
    size_t next = 0, done = 0;
    uint64_t tokens = 0;
    generator.run(
        [&](target::Prompt& prompt) {
          if (next >= open.size() || stop_requested()) return false;
          prompt = {open[next]->id, prompt_of(*open[next])};
          ++next;
          return true;
        },
        [&](target::Generated&& s) {
          journal.append(OrderedJson{{"id", s.id}, {"finish", s.ended ? "stop" : "length"}, {"ids", s.ids}});
          tokens += s.ids.size();
          answers[s.id] = {std::move(s.ids), s.ended};
          progress.update(++done, fmt::format("{} tokens", tokens));
          return !stop_requested();
        });
    progress.finish();
    if (stop_requested()) stopped("the answers written so far are kept; start the same command again to go on");
  }
  std::vector<AnsweredRow> rows;
  for (const Question& q : questions) {
    const auto& [ids, ended] = answers.at(q.id);
    if (!ended && options.on_length == "drop") continue;
    AnsweredRow row;
    row.row.where = fmt::format("{}, the answer to question {}", (options.out / "answers.jsonl").string(), q.id);
    row.row.ids = prompt_of(q);
    row.row.mask.assign(row.row.ids.size(), 0);
    row.row.ids.insert(row.row.ids.end(), ids.begin(), ids.end());
    row.row.mask.resize(row.row.ids.size(), 1);
    row.row.id = formats::row_id(row.row.ids, row.row.mask);
    // Of the question alone: another answer to it is the same conversation.
    row.row.conversation = formats::conversation_id(normalised_question(q.text));
    row.finish = ended ? FinishReason::stop : FinishReason::length;
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace dspark::job
