#include "job/store_tools.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "core/error.h"
#include "core/log.h"
#include "core/stop.h"
#include "formats/store_manifest.h"

namespace dspark::job {

using namespace formats;

namespace {

std::string taps_text(const Json& taps) {
  std::string s;
  for (const Json& t : taps) {
    const int n = t.get<int>();
    s += s.empty() ? "" : " ";
    s += n == kUnknownTap ? "?" : std::to_string(n);
  }
  return s.empty() ? "none" : s;
}

std::string or_unknown(const std::string& s) { return s.empty() ? "unknown" : s; }

std::string not_finite_text(const StatePosition& bad) { return fmt::format("its state of token {} holds {} (column {})", bad.row, bad.value, bad.column); }

// One sample of an input as a record of the output.
struct Taker {
  explicit Taker(const RecordFormat& f) : format(f) {}
  // "" or why the sample cannot be taken.
  std::string take(const SampleSource& source, int64_t i) {
    const auto* store = dynamic_cast<const StoreReader*>(&source);
    try {
      if (std::string why = source.check(i); !why.empty()) return why;
      const SampleInfo& info = source.info(i);
      const SampleTokens tokens = source.tokens(i);
      content = content_id(tokens.token_ids, tokens.loss_mask);
      id = store ? info.id : content;
      states.resize(static_cast<size_t>(info.n_tokens * source.row_width()));
      source.read_states(i, states.data(), source.row_width());
      if (const auto bad = first_non_finite(states.data(), info.n_tokens, source.row_width(), source.row_width())) return not_finite_text(*bad);
      if (store) {
        record = store->record(i);
        return "";
      }
      // Foreign ids are numbers that another input may use too, so its conversation is the new id as well.
      encode_record(format, {id, tokens.token_ids, tokens.loss_mask, info.finish, states.data(), source.row_width()},
                    encoded);
      record = encoded;
      return "";
    } catch (const Error& e) {
      return e.what();
    }
  }

  RecordFormat format;
  uint64_t id = 0, content = 0;
  std::span<const std::byte> record;
  std::vector<bf16> states;
  std::vector<std::byte> encoded;
};

}  // namespace

std::string how_to_mend(const fs::path& store) {
  return fmt::format("`dspark extract --merge {} --out NEW` keeps what is whole, and the same extract with --out NEW adds the rest", store.string());
}

void require_whole(const SampleSource& source) {
  const auto* store = dynamic_cast<const StoreReader*>(&source);
  const std::string path = source.path().string();
  const StoreProblem* first = nullptr;
  size_t n = 0;
  for (const StoreProblem& p : source.problems()) {
    if (p.tail) log_warn("{}: {} (the end of an extract that was stopped; all samples before it are whole)", path, p.text());
    else if (n++ == 0) first = &p;
  }
  if (n == 0) {
    if (store && !store->complete()) log_warn("{}: not finished, extract was stopped or still runs; its {} samples so far are used", path, source.size());
    return;
  }
  const std::string more = n > 1 ? fmt::format(" (and {} more)", n - 1) : "";
  DS_REQUIRE(store, "{} is damaged: {}{}; mend or take away what is not whole", path, first->text(), more);
  fail("{} is damaged: {}{}; {}; `--verify {}` lists all damage", path, first->text(), more, how_to_mend(source.path()), path);
}

void require_outside_stores(const fs::path& out, bool inside, const std::vector<fs::path>& stores) {
  std::error_code ec;
  const auto holds_store = [&](const fs::path& at) {
    for (const fs::path& s : stores)
      if (fs::equivalent(s, at, ec)) return true;
    // Only what is there is looked at: a folder above may be none of ours to list.
    return fs::exists(at / shard_name(0), ec) || ((fs::exists(at / kManifestName, ec) || fs::exists(at / kProgressName, ec)) && is_store(at));
  };
  const fs::path whole = fs::weakly_canonical(fs::absolute(out, ec), ec);
  for (fs::path at = inside ? whole.parent_path() : whole; !at.empty(); at = at.parent_path()) {
    if (holds_store(at)) fail_usage("--out {}: it lies in the store {}; choose a folder outside of it", out.string(), at.string());
    if (at == at.parent_path()) return;
  }
}

Json inspect_store(const fs::path& path, const OpenOptions& options) {
  const auto source = open_store(path, options);
  const StoreIdentity& id = source->identity();
  uint64_t tokens = 0, mask = 0, record_bytes = 0;
  int64_t longest = 0;
  Json finish = Json::object();
  for (int64_t i = 0; i < source->size(); ++i) {
    const SampleInfo& s = source->info(i);
    tokens += static_cast<uint64_t>(s.n_tokens);
    mask += static_cast<uint64_t>(s.n_mask);
    record_bytes += s.stored_bytes;
    longest = std::max(longest, s.n_tokens);
    const std::string reason(finish_reason_name(s.finish));
    finish[reason] = finish.value(reason, 0) + 1;
  }
  // What the same samples take uncompressed: states, token ids, loss mask.
  const uint64_t raw_bytes = tokens * (static_cast<uint64_t>(id.row_width()) * 2 + 5);
  Json j;
  j["path"] = path.string();
  j["kind"] = source->kind();
  j["complete"] = true;
  j["stored_bytes"] = record_bytes;
  if (const auto* store = dynamic_cast<const StoreReader*>(source.get())) {
    j["complete"] = store->complete();
    j["shards"] = store->n_shards();
    j["stored_bytes"] = store->file_bytes();
  }
  j["samples"] = source->size();
  j["tokens"] = tokens;
  j["loss_tokens"] = mask;
  j["longest"] = longest;
  j["finish"] = finish;
  j["raw_bytes"] = raw_bytes;
  j["ratio"] = record_bytes ? static_cast<double>(raw_bytes) / static_cast<double>(record_bytes) : 0.0;
  j["target"] = id.target;
  j["target_quantisation"] = id.target_quantisation;
  j["config_hash"] = id.config_hash;
  j["tokenizer_hash"] = id.tokenizer_hash;
  j["taps"] = id.taps;
  j["last_state"] = last_state_name(id.last_state);
  j["hidden_size"] = id.hidden_size;
  j["vocab_size"] = id.vocab_size;
  j["codec"] = codec_name(id.codec);
  j["lossy"] = id.codec == StoreCodec::fp8;
  j["extra"] = id.extra;
  j["problems"] = Json::array();
  for (const StoreProblem& p : source->problems()) j["problems"].push_back(p.text());
  return j;
}

std::string store_table(const Json& j) {
  std::string out;
  const auto row = [&out](std::string_view key, const std::string& value) {
    out += fmt::format("{:<18} {}\n", key, value);
  };
  const auto text = [&j](const char* key) { return j.at(key).get<std::string>(); };
  const auto number = [&j](const char* key) { return j.at(key).get<uint64_t>(); };
  const double tokens = std::max<double>(1, static_cast<double>(number("tokens")));
  row("store", fmt::format("{} ({}{})", text("path"), text("kind"),
                           j.at("complete").get<bool>() ? "" : ", not finished: extract was stopped or still runs"));
  row("target", or_unknown(text("target")));
  row("quantisation", or_unknown(text("target_quantisation")));
  row("config hash", or_unknown(text("config_hash")));
  row("tokenizer hash", or_unknown(text("tokenizer_hash")));
  row("taps", fmt::format("{} (after n layers), last state {}", taps_text(j.at("taps")), text("last_state")));
  row("hidden size", fmt::format("{}, vocabulary {}", number("hidden_size"),
                                 number("vocab_size") ? std::to_string(number("vocab_size")) : "unknown"));
  for (const auto& [key, value] : j.at("extra").items()) row(key, value.get<std::string>());
  row("samples", fmt::format("{}, the longest of {} tokens", number("samples"), number("longest")));
  row("tokens", fmt::format("{}, {} ({:.1f} %) under the loss mask", number("tokens"), number("loss_tokens"),
                            100.0 * static_cast<double>(number("loss_tokens")) / tokens));
  std::string finish;
  for (const auto& [key, value] : j.at("finish").items())
    finish += fmt::format("{}{} {}", finish.empty() ? "" : ", ", value.get<uint64_t>(), key);
  row("finish reasons", finish.empty() ? "none" : finish);
  row("size", fmt::format("{}{}, {:.0f} bytes a token", format_bytes(static_cast<double>(number("stored_bytes"))),
                          j.contains("shards") ? fmt::format(" in {} shards", number("shards")) : "",
                          static_cast<double>(number("stored_bytes")) / tokens));
  row("codec", fmt::format("{}{}, ratio {:.2f}", text("codec"), j.at("lossy").get<bool>() ? " (lossy)" : "",
                           j.at("ratio").get<double>()));
  for (const Json& p : j.at("problems")) row("problem", p.get<std::string>());
  return out;
}

StoreCheck verify_store(const fs::path& path, const OpenOptions& options) {
  const auto source = open_store(path, options);
  const auto* store = dynamic_cast<const StoreReader*>(source.get());
  StoreCheck result;
  result.problems = source->problems();
  if (store) result.complete = store->complete();
  Progress progress("verify", static_cast<uint64_t>(source->size()), "samples");
  std::vector<bf16> states;
  std::unordered_map<uint64_t, int64_t> seen;
  for (int64_t i = 0; i < source->size(); ++i) {
    if (stop_requested()) stopped("nothing: the check was not finished");
    const SampleInfo& info = source->info(i);
    const auto place = [&](const std::string& what) {
      return StoreProblem{store ? store->shard_of(i) : path.filename().string(), store ? store->offset_of(i) : 0, fmt::format("sample {} (id {:016x}): {}", i, info.id, what)};
    };
    std::string why = source->check(i);
    if (why.empty()) {
      try {
        source->tokens(i);
        states.resize(static_cast<size_t>(info.n_tokens * source->row_width()));
        source->read_states(i, states.data(), source->row_width());
        if (const auto bad = first_non_finite(states.data(), info.n_tokens, source->row_width(), source->row_width()))
          result.not_finite.push_back(place(not_finite_text(*bad)));
      } catch (const Error& e) {
        why = e.what();
      }
    }
    const auto [it, first] = seen.emplace(info.id, i);
    if (why.empty() && !first) why = fmt::format("the id of sample {} again", it->second);
    if (why.empty())
      ++result.samples;
    else
      result.problems.push_back(place(why));
    result.bytes += info.stored_bytes;
    progress.update(static_cast<uint64_t>(i) + 1);
  }
  progress.finish();
  return result;
}

MergeResult merge_stores(const std::vector<fs::path>& inputs, const fs::path& out, StoreCodec codec,
                         const OpenOptions& options) {
  DS_REQUIRE(!inputs.empty(), "merge: no input stores");
  std::vector<std::unique_ptr<SampleSource>> sources;
  uint64_t total = 0;
  for (const fs::path& input : inputs) {
    std::error_code ignored;
    DS_REQUIRE(!fs::equivalent(input, out, ignored), "merge: {} is input and output at once", out.string());
    sources.push_back(open_store(input, options));
    total += static_cast<uint64_t>(sources.back()->size());
  }
  const auto identity_of = [codec](const SampleSource& s) {
    StoreIdentity id = s.identity();
    if (!dynamic_cast<const StoreReader*>(&s)) id.codec = codec;
    return id;
  };
  const StoreIdentity identity = identity_of(*sources[0]);
  for (const auto& s : sources) {
    const std::string difference = identity_difference(identity_of(*s), identity, IdentityCompare::full, "in the one", "in the other");
    DS_REQUIRE(difference.empty(), "merge: {} and {} hold different things ({})", s->path().string(),
               sources[0]->path().string(), difference);
  }

  StoreWriter writer(out, identity);
  MergeResult result;
  std::unordered_map<uint64_t, uint64_t> content;  // id -> what the sample under that id is
  Progress progress("merge", total, "samples");
  uint64_t n_done = 0;
  Taker taker(writer.format());
  for (const auto& source : sources) {
    const auto* store = dynamic_cast<const StoreReader*>(source.get());
    DS_REQUIRE(!store || store->format().identity_crc == writer.format().identity_crc,
               "merge: {} spells its identity in another way than {} (written by another version)",
               source->path().string(), out.string());
    for (const StoreProblem& p : source->problems())
      result.problems.push_back({source->path() / p.file, p.offset, p.what});
    for (int64_t i = 0; i < source->size(); ++i) {
      if (stop_requested()) {
        writer.checkpoint();
        stopped("the merged store so far; run the same command to go on");
      }
      progress.update(++n_done);
      if (const std::string why = taker.take(*source, i); !why.empty()) {
        result.problems.push_back({source->path() / (store ? store->shard_of(i) : ""), store ? store->offset_of(i) : 0,
                                   fmt::format("sample {} is left out: {}", i, why)});
        continue;
      }
      const auto [it, first] = content.emplace(taker.id, taker.content);
      DS_REQUIRE(
          first || it->second == taker.content,
          "merge: {} has another sample under the id {:016x} than an input before it; were the rows of one of them "
          "changed between two extracts?",
          source->path().string(), taker.id);
      if (!first)
        ++result.duplicates;
      else
        result.added += writer.append(taker.record);
    }
  }
  progress.finish();
  DS_REQUIRE(writer.totals().samples > 0, "merge: {} would be empty, nothing in what is merged is whole{}", out.string(), result.problems.empty() ? "" : ": " + result.problems.front().text());
  writer.finish();
  result.samples = static_cast<int64_t>(writer.totals().samples);
  return result;
}

}  // namespace dspark::job
