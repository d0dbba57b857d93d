// Which records are of one conversation: in the store's bytes, old and new, from extract, and in the validation split.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli_bench.h"
#include "core/error.h"
#include "core/files.h"
#include "core/hash.h"
#include "core/rng.h"
#include "formats/store.h"
#include "job/store_tools.h"
#include "train/data.h"

using namespace dspark;
using namespace dspark::formats;
using Catch::Contains;

namespace {

StoreIdentity tiny_identity() {
  StoreIdentity id;
  id.target = "tiny";
  id.taps = {1};
  id.hidden_size = 4;
  id.codec = StoreCodec::raw;
  return id;
}

// A sample's rows follow from its id.
struct Fabricated {
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;
  std::vector<bf16> states;
  explicit Fabricated(uint64_t id) {
    const size_t n = 3 + id % 5;
    for (size_t t = 0; t < n; ++t) ids.push_back(static_cast<int32_t>((id * 31 + t) % 100));
    mask.assign(n, 1);
    for (size_t i = 0; i < n * 8; ++i) states.push_back(to_bf16(static_cast<float>((id + i) % 97)));
  }
  SampleView view(uint64_t id, uint64_t conversation) const {
    return {.id = id, .token_ids = ids, .loss_mask = mask, .states = states.data(), .row_stride = 8, .conversation = conversation};
  }
};

struct Entry {
  uint64_t id, conversation;
};

void write_entries(const fs::path& folder, const std::vector<Entry>& entries) {
  StoreWriter w(folder, tiny_identity());
  for (const Entry& e : entries) REQUIRE(w.append(encode_record(w.format(), Fabricated(e.id).view(e.id, e.conversation))));
  w.finish();
}

template <typename T>
void put(std::string& bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(T));
}
template <typename T>
T get(const std::string& bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}
uint32_t crc_of(const std::string& bytes, size_t begin, size_t end) {
  return crc32c(std::as_bytes(std::span(bytes.data() + begin, end - begin)));
}

// A shard of version 1.`minor` whose record headers have `header_bytes`: what lies between the headers never changed.
std::string shard_of_minor(uint16_t minor, uint32_t header_bytes, const std::vector<Entry>& entries) {
  const std::string text = identity_text(tiny_identity());
  std::string shard(40, '\0');
  std::memcpy(shard.data(), "DSPKSTOR", 8);
  put<uint16_t>(shard, 8, 1);
  put<uint16_t>(shard, 10, minor);
  put<uint32_t>(shard, 16, static_cast<uint32_t>(40 + text.size()));
  put<uint32_t>(shard, 20, static_cast<uint32_t>(text.size()));
  put<uint32_t>(shard, 24, crc_of(text, 0, text.size()));
  put<uint32_t>(shard, 36, crc_of(shard, 0, 36));
  shard += text;
  for (const Entry& e : entries) {
    const auto record = encode_record(record_format(tiny_identity()), Fabricated(e.id).view(e.id, e.conversation));
    const std::string now(reinterpret_cast<const char*>(record.data()), record.size());
    REQUIRE(get<uint32_t>(now, 8) == 72);
    std::string header(header_bytes, '\x5a');
    std::memcpy(header.data(), "DREC", 4);
    put<uint32_t>(header, 8, header_bytes);
    put<uint32_t>(header, 12, crc_of(text, 0, text.size()));
    put<uint64_t>(header, 16, now.size() - 72 + header_bytes);
    put<uint64_t>(header, 24, e.id);
    put<uint32_t>(header, 32, static_cast<uint32_t>(Fabricated(e.id).ids.size()));
    put<uint32_t>(header, 36, static_cast<uint32_t>(Fabricated(e.id).ids.size()));
    put<uint16_t>(header, 40, 2);
    put<uint16_t>(header, 42, 0);
    put<uint32_t>(header, 44, 4);
    for (size_t at = 48; at < 64; at += 4) put<uint32_t>(header, at, get<uint32_t>(now, at));
    if (header_bytes >= 72) put<uint64_t>(header, 64, e.conversation);
    put<uint32_t>(header, 4, crc_of(header, 8, header_bytes));
    shard += header + now.substr(72);
  }
  return shard;
}

void check_entry(const SampleSource& source, int64_t i, const Entry& want) {
  INFO("sample " << i);
  const Fabricated sample(want.id);
  CHECK(source.info(i).id == want.id);
  CHECK(source.info(i).conversation == want.conversation);
  CHECK(source.check(i) == "");
  const auto tokens = source.tokens(i);
  CHECK(tokens.token_ids == sample.ids);
  CHECK(tokens.loss_mask == sample.mask);
  std::vector<bf16> states(sample.states.size());
  source.read_states(i, states.data(), source.row_width());
  CHECK(std::memcmp(states.data(), sample.states.data(), states.size() * 2) == 0);
}

train::Dataset dataset_of(const std::vector<fs::path>& stores, double fraction, uint64_t seed) {
  std::vector<std::unique_ptr<SampleSource>> sources;
  for (const auto& path : stores) sources.push_back(open_store(path));
  return {std::move(sources), fraction, seed};
}

std::vector<uint64_t> ids_of(const std::vector<train::DocumentRef>& documents) {
  std::vector<uint64_t> out;
  for (const auto& d : documents) out.push_back(d.id);
  return out;
}

// Qwen3's manner: only the last answer keeps its thinking, so a conversation becomes a row for each answer.
constexpr const char* kDropsThinking =
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

OrderedJson thinking_conversation(int number, int turns) {
  OrderedJson messages = OrderedJson::array();
  for (int t = 0; t < turns; ++t) {
    messages.push_back({{"role", "user"}, {"content", fmt::format("Question {} of conversation {}?", t, number)}});
    messages.push_back({{"role", "assistant"}, {"content", fmt::format("<think>{} and {}</think>Answer {}.", number, t, t * number)}});
  }
  return messages;
}

// conversation -> how many samples, of a finished store.
std::map<uint64_t, int> conversations_in(const fs::path& folder) {
  const StoreReader reader(folder);
  CHECK(reader.complete());
  std::map<uint64_t, int> out;
  for (int64_t i = 0; i < reader.size(); ++i) ++out[reader.info(i).conversation];
  return out;
}

std::vector<int> sizes(const std::map<uint64_t, int>& conversations) {
  std::vector<int> out;
  for (const auto& [id, n] : conversations) out.push_back(n);
  std::sort(out.begin(), out.end());
  return out;
}

void run_ok(const std::vector<std::string>& arguments) {
  const Ran ran = dspark_run(arguments);
  INFO(ran.describe());
  REQUIRE(ran.code == 0);
}

}  // namespace

TEST_CASE("a store keeps conversations, through a resume and a merge", "[store][conversation]") {
  const Scratch scratch;
  const std::vector<Entry> first{{1, 900}, {2, 900}}, more{{3, 900}, {4, 0}};
  const fs::path store = scratch.folder / "store", other = scratch.folder / "other", merged = scratch.folder / "merged";
  write_entries(store, first);
  write_entries(store, more);
  write_entries(other, {{5, 900}, {6, UINT64_MAX}});
  job::merge_stores({store, other}, merged);
  const StoreReader reader(merged);
  REQUIRE(reader.size() == 6);
  const std::vector<Entry> all{{1, 900}, {2, 900}, {3, 900}, {4, 0}, {5, 900}, {6, UINT64_MAX}};
  for (size_t i = 0; i < all.size(); ++i) check_entry(reader, static_cast<int64_t>(i), all[i]);

  // Nothing said: a conversation of its own.
  const SampleView alone{.id = 77};
  CHECK(alone.conversation == 77);
}

TEST_CASE("records of version 1.0 are read, each a conversation of its own", "[store][conversation][fault]") {
  const Scratch scratch;
  const fs::path old = scratch.folder / "old", cut = scratch.folder / "cut", merged = scratch.folder / "merged";
  const std::vector<Entry> written{{11, 900}, {12, 900}, {13, 901}};
  const std::string shard = shard_of_minor(0, 64, written);
  fs::create_directory(old);
  write_bytes(old / shard_name(0), shard);
  {
    const StoreReader reader(old);
    CHECK(reader.problems().empty());
    REQUIRE(reader.size() == 3);
    for (int64_t i = 0; i < 3; ++i) {
      const uint64_t id = written[static_cast<size_t>(i)].id;
      check_entry(reader, i, {id, id});
      CHECK(reader.offset_of(i) + reader.info(i).stored_bytes == (i < 2 ? reader.offset_of(i + 1) : shard.size()));
    }
  }
  CHECK(job::verify_store(old).problems.empty());

  // Cut at every byte: the whole records, and those only.
  fs::create_directory(cut);
  const size_t begin = shard.find("DREC");
  std::vector<size_t> ends;
  {
    const StoreReader reader(old);
    for (int64_t i = 0; i < 3; ++i) ends.push_back(reader.offset_of(i) + reader.info(i).stored_bytes);
  }
  for (size_t n = begin; n <= shard.size(); ++n) {
    INFO("cut to " << n);
    write_bytes(cut / shard_name(0), shard.substr(0, n));
    const StoreReader reader(cut);
    REQUIRE(reader.size() == std::upper_bound(ends.begin(), ends.end(), n) - ends.begin());
    REQUIRE(reader.problems().empty() == (n == begin || std::find(ends.begin(), ends.end(), n) != ends.end()));
  }

  // An old record is copied as it is into a new shard; what is appended goes into one of today's version.
  write_entries(scratch.folder / "new", {{14, 901}});
  job::merge_stores({old, scratch.folder / "new"}, merged);
  write_entries(old, {{14, 901}});
  for (const fs::path& folder : {old, merged}) {
    INFO(folder.filename().string());
    const StoreReader reader(folder);
    CHECK(reader.problems().empty());
    CHECK(reader.n_shards() == (folder == old ? 2 : 1));
    REQUIRE(reader.size() == 4);
    for (int64_t i = 0; i < 3; ++i) check_entry(reader, i, {written[static_cast<size_t>(i)].id, written[static_cast<size_t>(i)].id});
    check_entry(reader, 3, {14, 901});
  }
  std::string bytes = file_bytes(old / shard_name(0));
  CHECK(bytes == shard);
  bytes = file_bytes(old / shard_name(1));
  CHECK(get<uint16_t>(bytes, 8) == 1);
  CHECK(get<uint16_t>(bytes, 10) == 1);
}

TEST_CASE("a longer record header of a newer minor version is read as far as it is known", "[store][conversation]") {
  const Scratch scratch;
  const std::vector<Entry> written{{21, 7}, {22, 7}};
  write_bytes(scratch.folder / shard_name(0), shard_of_minor(2, 88, written));
  const StoreReader reader(scratch.folder);
  CHECK(reader.problems().empty());
  REQUIRE(reader.size() == 2);
  for (int64_t i = 0; i < 2; ++i) check_entry(reader, i, written[static_cast<size_t>(i)]);
}

TEST_CASE("samples of foreign formats are conversations of their own", "[store][conversation]") {
  const Scratch scratch;
  const fs::path golden = fs::path(DSPARK_SOURCE_DIR) / "tests/golden/train";
  for (const auto& source : {open_store(golden / "deepspec_cache"), open_store(golden / "hs_folder", {.taps = {2, 4, 6}, .assume_full_mask = true})})
    for (int64_t i = 0; i < source->size(); ++i) CHECK(source->info(i).conversation == source->info(i).id);
  job::merge_stores({golden / "deepspec_cache"}, scratch.folder / "out");
  const StoreReader reader(scratch.folder / "out");
  for (int64_t i = 0; i < reader.size(); ++i) CHECK(reader.info(i).conversation == reader.info(i).id);
}

TEST_CASE("no conversation is on both sides of the validation split", "[train][conversation]") {
  const Scratch scratch;
  const fs::path store = scratch.folder / "store";
  const Rng rng(5, RngStream::test);
  std::vector<Entry> entries;
  for (uint64_t c = 0; c < 80; ++c)
    for (uint64_t k = 0; k <= rng.below(c, 5); ++k) entries.push_back({rng.bits(1000 + entries.size()), rng.bits(500 + c)});
  // Stored in no order at all.
  for (size_t i = entries.size() - 1; i > 0; --i) std::swap(entries[i], entries[rng.below(5000 + i, i + 1)]);
  write_entries(store, entries);
  std::set<std::vector<uint64_t>> splits;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const double fraction = seed % 3 == 0 ? 0.05 : seed % 3 == 1 ? 0.3 : 0.7;
    INFO("seed " << seed << ", fraction " << fraction);
    const auto data = dataset_of({store}, fraction, seed);
    REQUIRE(data.training().size() + data.validation().size() == entries.size());
    std::set<uint64_t> left, right;
    for (const auto& d : data.training()) left.insert(d.conversation);
    for (const auto& d : data.validation()) right.insert(d.conversation);
    REQUIRE(left.size() + right.size() == 80);  // each on one side
    // 80 fair draws: five standard deviations.
    const double mean = 80 * fraction, deviation = std::sqrt(80 * fraction * (1 - fraction));
    REQUIRE(std::abs(static_cast<double>(right.size()) - mean) < 5 * deviation);
    for (const auto* side : {&data.training(), &data.validation()}) {
      const auto ids = ids_of(*side);
      REQUIRE(std::is_sorted(ids.begin(), ids.end()));
    }
    splits.insert(ids_of(data.validation()));
  }
  CHECK(splits.size() > 290);
  CHECK(dataset_of({store}, 0.0, 1).validation().empty());
}

TEST_CASE("where samples are their own conversations their ids decide the split", "[train][conversation]") {
  const Scratch scratch;
  std::vector<Entry> entries;
  for (uint64_t id = 1; id <= 60; ++id) entries.push_back({id, 7});
  write_bytes(scratch.folder / shard_name(0), shard_of_minor(0, 64, entries));  // version 1.0: nobody knows that they belong together
  const auto data = dataset_of({scratch.folder}, 0.4, 3);
  const Rng split(3, RngStream::split);
  std::vector<uint64_t> training, validation;
  for (uint64_t id = 1; id <= 60; ++id) (split.uniform(id) < 0.4 ? validation : training).push_back(id);
  CHECK(ids_of(data.training()) == training);
  CHECK(ids_of(data.validation()) == validation);
}

TEST_CASE("a document that two stores give to different conversations joins them", "[train][conversation]") {
  const Scratch scratch;
  const fs::path old = scratch.folder / "old", now = scratch.folder / "now";
  fs::create_directory(old);
  std::vector<Entry> known, before;
  for (uint64_t c = 0; c < 40; ++c)
    for (uint64_t k = 0; k < 3; ++k) {
      known.push_back({100 + 3 * c + k, 1000 + c});
      if (k != 1) before.push_back(known.back());
    }
  write_bytes(old / shard_name(0), shard_of_minor(0, 64, before));
  write_entries(now, known);
  for (uint64_t seed = 0; seed < 100; ++seed) {
    INFO("seed " << seed);
    std::vector<uint64_t> validation;
    for (const auto& stores : {std::vector{old, now}, std::vector{now, old}}) {
      const auto data = dataset_of(stores, 0.3, seed);
      REQUIRE(data.training().size() + data.validation().size() == known.size());
      std::set<uint64_t> left, right;
      for (const auto& d : data.training()) left.insert((d.id - 100) / 3);
      for (const auto& d : data.validation()) right.insert((d.id - 100) / 3);
      REQUIRE(left.size() + right.size() == 40);
      if (stores.front() == old) validation = ids_of(data.validation());
      else REQUIRE(ids_of(data.validation()) == validation);
    }
  }
}

TEST_CASE("a split that leaves nothing to train on is said", "[train][conversation]") {
  const Scratch scratch;
  const fs::path store = scratch.folder / "store";
  write_entries(store, {{1, 5}, {2, 5}, {3, 5}});
  const Rng split(0, RngStream::split);
  CHECK_THROWS_WITH(dataset_of({store}, split.uniform(5) + 1e-9, 0), Contains("took all 3 samples"));
  CHECK(dataset_of({store}, split.uniform(5), 0).training().size() == 3);
}

TEST_CASE("extract: the rows of a conversation share an id that follows from its text", "[cli][conversation]") {
  const Bench b(0, 0, {.chat_template = kDropsThinking});
  auto line = [](const OrderedJson& messages) { return OrderedJson{{"messages", messages}}.dump() + "\n"; };
  const std::string one = line(thinking_conversation(1, 3)), two = line(thinking_conversation(2, 2)), three = line(thinking_conversation(3, 1));
  const std::string tokens = R"({"input_ids": [65, 66, 67, 68], "loss_mask": [0, 1, 1, 1]})" "\n";
  // Another order, another dialect, keys the text does not depend on.
  std::string spelled;
  for (const auto& m : thinking_conversation(2, 2))
    spelled += fmt::format(R"({}{{"time": 5, "value": {}, "from": "{}"}})", spelled.empty() ? "" : ", ", m.at("content").dump(), m.at("role") == "user" ? "human" : "gpt");
  const fs::path first = b.scratch.put("first.jsonl", one + two + three + tokens);
  const fs::path second = b.scratch.put("second.jsonl", tokens + "{\"conversations\": [" + spelled + "]}\n" + one + two);
  const fs::path a = b.at("a"), c = b.at("c");
  run_ok(b.extract(a, {"--data", first}));
  run_ok(b.extract(c, {"--data", second}));
  const auto found = conversations_in(a);
  CHECK(sizes(found) == std::vector<int>{1, 1, 2, 3});
  const auto again = conversations_in(c);
  CHECK(sizes(again) == std::vector<int>{1, 2, 3});
  for (const auto& [id, n] : again) CHECK((found.contains(id) && found.at(id) == n));

  // A cut row is of the same conversation still, and the samples of a store decide what is done, not their conversations.
  run_ok(b.extract(b.at("cut"), {"--data", first, "--max-length", "150"}));
  for (const auto& [id, n] : conversations_in(b.at("cut"))) CHECK(found.contains(id));
  const Ran resumed = dspark_run(b.extract(a, {"--data", second, "--json", "-"}));
  INFO(resumed.describe());
  REQUIRE(resumed.code == 0);
  CHECK(json_lines(resumed.out).at(0)["new"] == 0);
  CHECK(conversations_in(a) == found);
}

TEST_CASE("extract: answers to one question are one conversation, whoever asked it", "[cli][conversation]") {
  const Bench b(0, 0);
  const fs::path prompts = b.scratch.put("prompts.jsonl", R"({"prompt": "What is a bridge?"})" "\n" R"({"turns": ["what is a  bridge", "and then?"]})" "\n"
                                                          R"({"prompt": "What is stone?"})" "\n");
  const fs::path asked = b.at("asked"), wrote = b.at("wrote");
  run_ok(b.extract(asked, {"--data", prompts, "--regenerate", "--max-new-tokens", "8"}));
  const auto answers = conversations_in(asked);
  CHECK(sizes(answers) == std::vector<int>{1, 2});
  fs::create_directory(wrote);
  write_bytes(wrote / "questions.jsonl", R"({"id": 0, "text": "What is a bridge?"})" "\n" R"({"id": 1, "text": "What is stone?"})" "\n");
  run_ok({"extract", "--target", b.target, "--synthesize", "2", "--out", wrote, "--taps", "1,2,3", "--max-new-tokens", "8", "--threads", "2"});
  const auto written = conversations_in(wrote);
  REQUIRE(written.size() == 2);
  for (const auto& [id, n] : written) CHECK(answers.contains(id));
}

TEST_CASE("extract --inspect prints whole lines", "[cli]") {
  const Bench b;
  const auto store = b.make_store();
  const Ran ran = dspark_run({"extract", "--inspect", store});
  INFO(ran.describe());
  CHECK(ran.code == 0);
  CHECK(ran.err.empty());
  REQUIRE(ran.out.size() > 2);
  CHECK(ran.out.back() == '\n');
  CHECK(ran.out[ran.out.size() - 2] != '\n');
  CHECK(ran.out.find("samples            12, the longest of") != std::string::npos);
}

TEST_CASE("a store of weight w gives each document w times an epoch", "[train][store]") {
  const Bench b(30, 8);
  const auto more = b.scratch.put("more.jsonl", tiny_rows(16, 8, 5));
  const auto first = b.make_store(), second = b.at("second");
  run_ok({"extract", "--target", b.target, "--data", more, "--out", second, "--taps", "1,2,3", "--codec", "raw"});
  auto dataset = [&](const std::vector<double>& weights) {
    std::vector<std::unique_ptr<SampleSource>> sources;
    for (const auto& path : {first, second}) sources.push_back(open_store(path));
    return train::Dataset(std::move(sources), 0, 3, weights);
  };
  const train::Dataset plain = dataset({}), ones = dataset({1, 1}), weighted = dataset({0.5, 2.25});
  CHECK(plain.epoch_size() == static_cast<int64_t>(plain.training().size()));
  for (int64_t i = 0; i < 2 * plain.epoch_size(); ++i) CHECK(plain.draw(i).document.id == ones.draw(i).document.id);

  int64_t n_first = 0, n_second = 0;
  for (const auto& d : weighted.training()) ++(d.source->path() == first ? n_first : n_second);
  REQUIRE(n_first >= 28);
  REQUIRE(n_second == 16);
  CHECK(weighted.epoch_size() == (n_first + 1) / 2 + 36);
  std::set<uint64_t> halves[2];
  std::set<std::pair<uint64_t, int64_t>> visits;  // what is drawn in a document differs at every visit
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    std::map<uint64_t, int> count;
    for (int64_t i = 0; i < weighted.epoch_size(); ++i) {
      const auto draw = weighted.draw(epoch * weighted.epoch_size() + i);
      ++count[draw.document.id];
      CHECK(visits.emplace(draw.document.id, draw.epoch).second);
      if (draw.document.source->path() == first) halves[epoch].insert(draw.document.id);
    }
    int twice = 0, thrice = 0;
    for (const auto& d : weighted.training()) {
      const int n = count[d.id];
      if (d.source->path() == first) CHECK(n <= 1);
      else twice += n == 2, thrice += n == 3;
    }
    CHECK(twice == 12);
    CHECK(thrice == 4);
  }
  CHECK(halves[0] != halves[1]);  // another half each epoch
  const train::Dataset again = dataset({0.5, 2.25});
  for (int64_t i = 0; i < 2 * weighted.epoch_size(); ++i) CHECK(again.draw(i).document.id == weighted.draw(i).document.id);
  CHECK_THROWS(dataset({0, 0}));
}
