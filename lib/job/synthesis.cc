#include "job/synthesis.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"

namespace dspark::job {

namespace {

fs::path record_path(const ExtractOptions& o) { return o.out / "synthesis.json"; }

Json settings_of(const ExtractOptions& o) {
  return Json{{"max_new_tokens", o.max_new_tokens}, {"question_tokens", o.question_tokens}, {"max_length", o.max_length}, {"temperature", o.temperature}, {"top_p", o.top_p}, {"seed", o.common.seed}};
}

}  // namespace

Synthesis::Synthesis(const ExtractOptions& options) : options_(options) {
  const fs::path path = record_path(options);
  if (!fs::exists(path)) return;
  const Json there = read_json(path), now = settings_of(options);
  DS_REQUIRE(there.is_object() && there.contains("settings") && there.contains("training") && there.contains("held_out"), "{} is not what extract writes there; take another --out", path.string());
  std::string difference;
  for (const auto& [key, value] : now.items())
    if (const Json before = there["settings"].value(key, value); before != value)
      difference += fmt::format("{}{} {} there, {} asked", difference.empty() ? "" : "; ", key, before.dump(), value.dump());
  DS_REQUIRE(difference.empty(), "{}: its conversations were written otherwise ({}); ask for the same, or take another --out", options.out.string(), difference);
  training_ = there["training"].get<std::set<uint64_t>>();
  held_ = there["held_out"].get<std::set<uint64_t>>();
}

int64_t Synthesis::wanted() const {
  return std::max(options_.synthesize, static_cast<int64_t>(training_.size())) + std::max(options_.hold_out, static_cast<int64_t>(held_.size()));
}

Synthesis::Split Synthesis::split(const std::vector<Question>& questions) {
  for (auto q = questions.rbegin(); q != questions.rend() && static_cast<int64_t>(held_.size()) < options_.hold_out; ++q)
    if (!training_.contains(q->id)) held_.insert(q->id);
  Split split;
  for (const Question& q : questions) {
    std::vector<Question>& to = held_.contains(q.id) ? split.held : split.training;
    const int64_t most = held_.contains(q.id) ? options_.hold_out : options_.synthesize;
    if (static_cast<int64_t>(to.size()) < most) to.push_back(q);
  }
  for (const Question& q : split.training) training_.insert(q.id);
  write_text_atomic(record_path(options_), Json{{"settings", settings_of(options_)}, {"training", training_}, {"held_out", held_}}.dump() + "\n");
  return split;
}

}  // namespace dspark::job
