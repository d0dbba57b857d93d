#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <random>
#include <thread>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "formats/byte_level.h"
#include "formats/gguf.h"
#include "formats/tokenizer.h"
#include "formats/utf8.h"
#include "golden.h"
#include "scratch.h"

using namespace dspark;
using namespace dspark::formats;

namespace {

const fs::path kGolden = fs::path(DSPARK_SOURCE_DIR) / "tests/golden/target";

// The strings that a case's numbers point into stand beside it, or with ours.
std::vector<std::string> strings(const fs::path& folder = kGolden) {
  const fs::path beside = folder / "tokenizer_strings/strings.json";
  const fs::path path = fs::exists(beside) ? beside : kGolden / "tokenizer_strings/strings.json";
  return read_json(path).at("strings").get<std::vector<std::string>>();
}

std::string from_hex(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

using Ids = std::vector<int32_t>;

fs::path in_cache(const std::string& name) {
  const char* cache = std::getenv("DSPARK_MODEL_CACHE");
  const char* home = std::getenv("HOME");
  return (cache ? fs::path(cache) : fs::path(home ? home : ".") / ".cache/dspark") / name;
}

fs::path model_path(const char* name) {
  const fs::path path = in_cache(name);
  INFO(path.string() << " is missing: `make model` fetches it, or set DSPARK_MODEL_CACHE to the folder that holds it");
  REQUIRE(fs::exists(path));
  return path;
}

// Every value of one case: ids with and without special tokens, decoding whole and as a stream, bad bytes, spans.
// Returns how many differ.
int check_case(const Tokenizer& tokenizer, const Json& golden, const std::vector<std::string>& texts) {
  int failures = 0;
  auto expect = [&](bool ok, const std::string& what) {
    if (!ok && ++failures <= 10) UNSCOPED_INFO(what);
  };
  for (const Json& c : golden.at("cases")) {
    const auto s = c.at("s").get<size_t>();
    const std::string& text = texts.at(s);
    const auto ids = c.at("ids").get<Ids>();
    const Ids plain = c.contains("ids_plain") ? c.at("ids_plain").get<Ids>() : ids;
    const std::string decoded = c.contains("decoded") ? c.at("decoded").get<std::string>() : text;
    const std::string skipped =
        c.contains("decoded_skip_special") ? c.at("decoded_skip_special").get<std::string>() : decoded;
    const Ids got = tokenizer.encode(text);
    expect(got == ids, fmt::format("string {} '{}': ids", s, text));
    expect(tokenizer.encode(text, {.parse_special = false}) == plain,
           fmt::format("string {} '{}': plain ids", s, text));
    expect(tokenizer.decode(ids) == decoded,
           fmt::format("string {} '{}': decoded '{}'", s, text, tokenizer.decode(ids)));
    expect(tokenizer.decode(ids, true) == skipped, fmt::format("string {} '{}': decoded without special", s, text));

    StreamDecoder stream(tokenizer, false);
    std::string streamed;
    for (int32_t id : ids) {
      const std::string part = stream.push(id);
      expect(utf8_valid(part), fmt::format("string {}: a stream part is not UTF-8", s));
      streamed += part;
    }
    expect(streamed + stream.finish() == decoded, fmt::format("string {}: streamed", s));

    // Spans cover the text in order and without a gap.
    const Encoding encoding = tokenizer.encode_spans(text);
    expect(encoding.ids == got, fmt::format("string {}: ids with spans", s));
    size_t covered = 0;
    for (const auto& [begin, end] : encoding.spans) {
      expect(begin <= covered && end >= covered && begin < end,
             fmt::format("string {}: span [{}, {}) after {}", s, begin, end, covered));
      covered = end;
    }
    expect(covered == text.size(), fmt::format("string {}: spans end at {} of {}", s, covered, text.size()));
  }
  for (const Json& c : golden.at("bad_bytes")) {
    const std::string bytes = from_hex(c.at("hex"));
    expect(utf8_lossy(bytes) == c.at("as_text").get<std::string>(),
           fmt::format("bytes {}: as text", c.at("hex").dump()));
    expect(tokenizer.encode(bytes) == c.at("ids").get<Ids>(), fmt::format("bytes {}: ids", c.at("hex").dump()));
  }
  for (const Json& c : golden.at("decode")) {
    const auto ids = c.at("ids").get<Ids>();
    std::string bytes;
    for (int32_t id : ids) bytes += tokenizer.piece(id);
    expect(bytes == from_hex(c.at("bytes_hex")), fmt::format("ids {}: bytes", c.at("ids").dump()));
    expect(tokenizer.decode(ids) == c.at("text").get<std::string>(), fmt::format("ids {}: text", c.at("ids").dump()));
  }
  if (golden.contains("flag_cases"))
    for (const Json& c : golden.at("flag_cases")) {
      const auto ids = c.at("ids").get<Ids>();
      expect(tokenizer.encode(c.at("text").get<std::string>()) == ids,
             fmt::format("flags '{}': ids", c.at("text").dump()));
      expect(tokenizer.decode(ids) == c.at("decoded").get<std::string>(),
             fmt::format("flags '{}': decoded", c.at("text").dump()));
    }
  if (golden.contains("add_special_tokens_example")) {
    const Json& c = golden.at("add_special_tokens_example");
    expect(tokenizer.encode(c.at("text").get<std::string>(), {.add_special = true}) == c.at("ids").get<Ids>(),
           "added tokens");
  }
  CHECK(failures == 0);
  return failures;
}

TokenizerData tiny() {
  TokenizerData data;
  data.pre = "gpt-2";
  data.tokens = {"a", "b", "c", "ab", "abc", "<|end|>", "<m>"};
  data.types = {TokenType::normal, TokenType::normal,  TokenType::normal, TokenType::normal,
                TokenType::normal, TokenType::control, TokenType::control};
  data.merges = {"a b", "ab c"};
  return data;
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& e) {
    return e.what();
  }
  return "(nothing was thrown)";
}

}  // namespace

TEST_CASE("tokenizers: every golden case with a tokenizer.json", "[tokenizer][golden]") {
  int read = 0;
  for (const golden::Case& c : golden::cases("tokenizer")) {
    const Json golden = golden::description(c);
    if (!fs::exists(c.folder / "tokenizer.json")) continue;
    if (read_json(c.folder / "tokenizer.json").at("model").value("byte_fallback", false)) {
      std::cout << "golden " << c.name << ": skipped, SentencePiece models are not supported yet\n";
      continue;
    }
    golden::Report report("tokenizer", c.name);
    const TokenizerData data = read_tokenizer_json(c.folder / "tokenizer.json");
    report.check("values that differ", check_case(Tokenizer(data), golden, strings(c.folder.parent_path())), 0.5);
    ++read;
  }
  CHECK(read >= 7);
}

TEST_CASE("tokenizer.json: known families are known by their patterns", "[tokenizer]") {
  for (const auto& [family, pre] : std::vector<std::pair<std::string, std::string>>{{"gpt2", "gpt-2"},
                                                                                    {"smollm", "smollm"},
                                                                                    {"qwen2", "qwen2"},
                                                                                    {"qwen35", "qwen35"},
                                                                                    {"llama3", "llama-bpe"},
                                                                                    {"deepseek3", "deepseek-v3"},
                                                                                    {"o200k", "gpt-4o"}}) {
    const TokenizerData data = read_tokenizer_json(kGolden / ("tokenizer_small_" + family) / "tokenizer.json");
    CHECK(data.pre == pre);
    CHECK(split_rule(pre).ignore_merges == data.split->ignore_merges);
    if (family != "qwen35") CHECK(split_rule(pre).nfc == data.split->nfc);  // its published ids do not have it
  }
}

TEST_CASE("tokenizer.json: SentencePiece-like models are refused by name", "[tokenizer]") {
  CHECK_THAT(message_of([] { read_tokenizer_json(kGolden / "tokenizer_small_spm/tokenizer.json"); }),
             Catch::Contains("SentencePiece") && Catch::Contains("tokenizer_small_spm"));
  TokenizerData data = tiny();
  data.model = "llama";
  CHECK_THAT(message_of([&] { Tokenizer t(data); }), Catch::Contains("'llama' is not supported yet"));
}

TEST_CASE("tokenizer.json: broken files are refused by name", "[tokenizer]") {
  const Scratch scratch;
  auto refused = [&](const std::string& text) {
    const fs::path path = scratch.put("tokenizer.json", text);
    return message_of([&] { Tokenizer t(read_tokenizer_json(path)); });
  };
  const std::string good = R"("model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]})";
  const std::string byte_level = R"("pre_tokenizer": {"type": "ByteLevel"})";
  CHECK(refused("{" + good + ", " + byte_level + "}") == "(nothing was thrown)");
  CHECK_THAT(refused("{"), Catch::Contains("tokenizer.json"));
  CHECK_THAT(refused("{}"), Catch::Contains("no key 'model'"));
  CHECK_THAT(refused("{" + good + "}"), Catch::Contains("no pre_tokenizer"));
  CHECK_THAT(refused("{" + good + R"(, "pre_tokenizer": {"type": "Metaspace"}})"),
             Catch::Contains("'Metaspace' is not supported"));
  CHECK_THAT(refused("{" + good + ", " + byte_level + R"(, "normalizer": {"type": "Lowercase"}})"),
             Catch::Contains("'Lowercase'"));
  CHECK_THAT(refused("{" + good + ", " + byte_level + R"(, "added_tokens": [{"id": -1, "content": "x"}]})"),
             Catch::Contains("id -1"));
  CHECK_THAT(refused("{" + good + ", " + byte_level + R"(, "added_tokens": [{"id": 4194304, "content": "x"}]})"),
             Catch::Contains("id 4194304"));
  CHECK_THAT(refused(R"({"model": {"type": "Unigram"}})"), Catch::Contains("'Unigram' is not supported"));
  CHECK_THAT(refused(R"({"model": {"vocab": {"a": "b"}, "merges": []}, )" + byte_level + "}"),
             Catch::Contains("not a tokenizer.json"));
  std::string deep = R"({"type": "ByteLevel"})";
  for (int i = 0; i < 20; ++i) deep = R"({"type": "Sequence", "pretokenizers": [)" + deep + "]}";
  CHECK_THAT(refused("{" + good + R"(, "pre_tokenizer": )" + deep + "}"), Catch::Contains("nest more than"));
}

TEST_CASE("tokenizer: what a file can get wrong is named", "[tokenizer]") {
  auto broken = [](const std::function<void(TokenizerData&)>& change) {
    return message_of([&] {
      TokenizerData data = tiny();
      change(data);
      Tokenizer t(std::move(data));
    });
  };
  CHECK_THAT(broken([](auto& d) { d.merges.push_back("ab"); }), Catch::Contains("merge 2 is 'ab'"));
  CHECK_THAT(broken([](auto& d) { d.merges.push_back("a c"); }), Catch::Contains("needs the token 'ac'"));
  CHECK_THAT(broken([](auto& d) { d.types.pop_back(); }), Catch::Contains("7 tokens but 6 token types"));
  CHECK_THAT(broken([](auto& d) { d.types[2] = static_cast<TokenType>(9); }), Catch::Contains("unknown type 9"));
  CHECK_THAT(broken([](auto& d) { d.eos = 7; }), Catch::Contains("eos token id is 7"));
  CHECK_THAT(broken([](auto& d) { d.add_bos = true; }), Catch::Contains("adds a bos token"));
  CHECK_THAT(broken([](auto& d) { d.pre = "klingon"; }),
             Catch::Contains("'klingon'") && Catch::Contains("known: gpt-2"));
  CHECK_THAT(broken([](auto& d) { d.split = SplitRule{{"(a"}, false, false}; }), Catch::Contains("does not compile"));
  CHECK_THAT(broken([](auto& d) {
               d.split = SplitRule{{"[a&&[^b]]"}, false, false};
             }),
             Catch::Contains("not supported"));
  CHECK_THAT(broken([](auto& d) { d.tokens.clear(), d.types.clear(); }), Catch::Contains("vocabulary of 0"));
  const Tokenizer t(tiny());
  CHECK_THAT(message_of([&] { t.decode(std::vector<int32_t>{7}); }),
             Catch::Contains("7 is outside the vocabulary of 7"));
  CHECK_THAT(message_of([&] { t.piece(-1); }), Catch::Contains("-1"));
}

TEST_CASE("tokenizer: end tokens, mask token and identity", "[tokenizer]") {
  TokenizerData data = tiny();
  {
    const Tokenizer t(data);
    CHECK(t.encode("abcab<|end|>c") == Ids{4, 3, 5, 2});
    CHECK(t.encode("") == Ids{});
    CHECK(t.end_tokens() == Ids{5});
    CHECK(t.is_end(5));
    CHECK_FALSE(t.is_end(6));
    CHECK(t.default_mask_token() == 6);
    CHECK(t.find("ab") == 3);
    CHECK_FALSE(t.find("ba"));
    CHECK(t.identity().size() == 64);
  }
  const std::string identity = Tokenizer(data).identity();
  auto differs = [&](const std::function<void(TokenizerData&)>& change) {
    TokenizerData other = tiny();
    change(other);
    return Tokenizer(std::move(other)).identity() != identity;
  };
  CHECK_FALSE(differs([](auto&) {}));
  CHECK_FALSE(differs([](auto& d) { d.chat_template = "x"; }));
  CHECK(differs([](auto& d) { d.tokens[6] = "<n>"; }));
  CHECK(differs([](auto& d) { d.types[6] = TokenType::user_defined; }));
  CHECK(differs([](auto& d) { d.merges.pop_back(); }));
  CHECK(differs([](auto& d) { d.pre = "qwen2"; }));
  data.chat_template = "{{ '<m>' }}";  // a token that the template writes is not free
  CHECK(Tokenizer(data).default_mask_token() == -1);
  data.mask = 2;
  CHECK(Tokenizer(data).default_mask_token() == 2);
  // Harmony: <|end|> ends a message, not the generation.
  TokenizerData harmony = tiny();
  for (const char* name : {"<|return|>", "<|call|>"}) {
    harmony.tokens.push_back(name);
    harmony.types.push_back(TokenType::control);
  }
  CHECK(Tokenizer(harmony).end_tokens() == Ids{7, 8});
}

TEST_CASE("byte-level spelling is a bijection", "[tokenizer]") {
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  CHECK(bytes_of_spelling(spelling_of_bytes(all)) == all);
  CHECK(spelling_of_bytes(" \n") == "ĠĊ");
  CHECK(bytes_of_spelling("<｜User｜>") == "<｜User｜>");  // not a spelling: itself
}

TEST_CASE("NFC in chunks is the NFC of the whole, and traces back", "[tokenizer]") {
  // Characters that compose, decompose, reorder or stand in the way.
  const std::vector<std::string> alphabet = {"a",  "e",  " ",          "́",   "̣",  "é", "ḍ", "가", "ᄀ", "ᅡ",
                                             "ᆨ", "か", "゙",           "ガ", "क", "़",  "ো", "ে",  "া",  "Å",
                                             "ﬁ",  "豈", "\U0001D15E", "漢", "<", "̸",  "😀", "ͅ",   "ଡ଼"};
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    const size_t n = random() % 12;
    for (size_t i = 0; i < n; ++i) text += alphabet[random() % alphabet.size()];
    const Normalised normal = normalise_nfc(text);
    REQUIRE(utf8_valid(normal.text));
    REQUIRE(normalise_nfc(normal.text).text == normal.text);  // already normal
    REQUIRE(normalise_nfc(normal.text).marks.empty());
    size_t covered = 0;
    for (size_t i = 0; i < normal.text.size(); ++i) {
      const auto [begin, end] = normal.source_range(i, i + 1);
      REQUIRE((begin <= covered && covered <= end && begin < end && end <= text.size()));
      covered = end;
    }
    REQUIRE(covered == (normal.text.empty() ? 0 : text.size()));
  }
  CHECK(normalise_nfc("e\u0301x").text == "éx");
  CHECK(normalise_nfc("a<\u0338").text == "a\u226E");
  CHECK(normalise_nfc("xe\u0301y").source_range(3, 4) == std::pair<size_t, size_t>{4, 5});  // y
  CHECK(normalise_nfc("xe\u0301y").source_range(1, 2) == std::pair<size_t, size_t>{1, 4});  // half of é: all of it
}

TEST_CASE("split patterns read \\s as the published tokenizers do", "[tokenizer]") {
  auto pieces = [](std::string_view pre, std::string_view text) {
    std::vector<std::string> out;
    Splitter(split_rule(pre).patterns).split(text, [&](size_t b, size_t e) {
      out.emplace_back(text.substr(b, e - b));
    });
    return out;
  };
  using Pieces = std::vector<std::string>;
  CHECK(pieces("gpt-2", "a  b") == Pieces{"a", " ", " b"});
  CHECK(pieces("smollm", "x  2") == Pieces{"x", "  ", "2"});
  CHECK(pieces("smollm", "1234") == Pieces{"1", "2", "3", "4"});
  CHECK(pieces("llama-bpe", "1234") == Pieces{"123", "4"});
  CHECK(pieces("qwen2", "it'ſ") == Pieces{"it", "'ſ"});
  CHECK(pieces("gpt-2", "a\u180Eb") == Pieces{"a", "\u180E", "b"});  // U+180E is not white space
  CHECK(pieces("gpt-2", "a\u0085\u3000b") == Pieces{"a", "\u0085", "\u3000", "b"});
  CHECK(pieces("default", "x=12345") == Pieces{"x", "=", "123", "45"});
  const std::string spaces(200000, ' ');  // no stack to overflow, no quadratic time
  CHECK(pieces("qwen2", spaces + "x").size() == 2);
}

TEST_CASE("long pieces without a border take n log n, not n squared", "[tokenizer]") {
  const Tokenizer t(tiny());
  std::string text;
  for (int i = 0; i < 300000; ++i) text += "abcab"[i % 5];
  const std::clock_t start = std::clock();  // CPU time: other processes do not count
  const Ids ids = t.encode(text);
  CHECK(ids.size() == 120000);
  CHECK(std::clock() - start < 10 * CLOCKS_PER_SEC);
}

TEST_CASE("a tokenizer is shared by threads", "[tokenizer]") {
  const Tokenizer t(read_tokenizer_json(kGolden / "tokenizer_small_qwen2/tokenizer.json"));
  const auto texts = strings();
  std::vector<Ids> expected;
  for (const auto& text : texts) expected.push_back(t.encode(text));
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (size_t n = 0; n < wrong.size(); ++n)
    threads.emplace_back([&, n] {
      for (size_t i = 0; i < texts.size(); ++i) wrong[n] += t.encode(texts[i]) != expected[i];
    });
  for (auto& thread : threads) thread.join();
  CHECK(std::all_of(wrong.begin(), wrong.end(), [](int w) { return w == 0; }));
}

TEST_CASE("a character cut over tokens is held back by the stream decoder", "[tokenizer]") {
  TokenizerData data;
  data.pre = "gpt-2";
  data.tokens = {spelling_of_bytes("\xF0\x9F"), spelling_of_bytes("\x98"), spelling_of_bytes("\x80!"), "x"};
  const Tokenizer t(data);
  StreamDecoder stream(t);
  CHECK(stream.push(0).empty());
  CHECK(stream.push(1).empty());
  CHECK(stream.push(2) == "😀!");
  CHECK(stream.push(0).empty());
  CHECK(stream.push(3) == "\uFFFDx");
  CHECK(stream.push(1) == "\uFFFD");  // can't begin a character
  CHECK(stream.push(0).empty());
  CHECK(stream.finish() == "\uFFFD");
  CHECK(stream.finish().empty());
}

TEST_CASE("tokenizers: every golden case of a model's file", "[tokenizer][golden][model]") {
  REQUIRE(fs::exists(model_path("SmolLM2-135M-Instruct.Q4_1.gguf")));
  for (const golden::Case& c : golden::cases("tokenizer")) {
    const Json golden = golden::description(c);
    if (!golden.contains("source")) continue;
    const std::string model =
        golden.contains("tokenizer.ggml") ? golden.at("tokenizer.ggml").value("model", "") : "gpt2";
    const fs::path file = in_cache(fs::path(golden.at("source").at("file").get<std::string>()).filename().string());
    if (model != "gpt2" || !fs::exists(file)) {
      std::cout << "golden " << c.name << ": skipped, "
                << (model != "gpt2" ? "SentencePiece models are not supported yet" : file.string() + " is not there")
                << '\n';
      continue;
    }
    golden::Report report("tokenizer", c.name);
    const bool gguf = file.extension() == ".gguf";
    const Tokenizer t = gguf ? load_tokenizer(file) : Tokenizer(read_tokenizer_json(file));
    report.check("values that differ", check_case(t, golden, strings(c.folder.parent_path())), 0.5);
  }
}

TEST_CASE("the tokenizer of SmolLM2's GGUF file", "[tokenizer][model]") {
  const Gguf file(model_path("SmolLM2-135M-Instruct.Q4_1.gguf"));
  const Tokenizer t = tokenizer_from_gguf(file);
  const Json golden = read_json(kGolden / "tokenizer_smollm2/case.json");
  const Json& says = golden.at("tokenizer.ggml");
  CHECK(t.bos() == says.at("bos_token_id"));
  CHECK(t.eos() == says.at("eos_token_id"));
  CHECK(t.pad() == says.at("padding_token_id"));
  CHECK(t.unk() == says.at("unknown_token_id"));
  CHECK(t.add_bos() == says.at("add_bos_token"));
  CHECK(t.text(t.eos()) == "<|im_end|>");
  CHECK(t.end_tokens() == Ids{0, 2});  // <|endoftext|>, <|im_end|>
  CHECK(t.text(t.default_mask_token()) == "<empty_output>");
  CHECK_THAT(t.chat_template(), Catch::Contains("<|im_start|>"));
  CHECK(load_tokenizer(file.path()).identity() == t.identity());

  // Fast enough to tokenise as much as is extracted (tens of MB/s; sanitizer builds are ten times slower).
  std::string text;
  const auto texts = strings();
  while (text.size() < 4'000'000)
    for (const auto& s : texts) text += s + " and so it goes on, with words that come back again.\n";
  const std::clock_t start = std::clock();  // CPU time: other processes do not count
  CHECK(t.encode(text).size() > 100'000);
  CHECK(std::clock() - start < 10 * CLOCKS_PER_SEC);
}

TEST_CASE("the tokenizers inside the small GGUF files", "[tokenizer][golden]") {
  for (const char* family : {"llama3", "qwen2"}) {
    DYNAMIC_SECTION(family) {
      const bool qwen = std::string_view(family) == "qwen2";
      const Gguf file(kGolden / "tiny_gguf" / (qwen ? "qwen2_q5_0" : "llama_q4_1") / "model.gguf");
      check_case(tokenizer_from_gguf(file),
                 read_json(kGolden / (std::string("tokenizer_small_") + family) / "case.json"), strings());
    }
  }
  CHECK_THAT(message_of([] { tokenizer_from_gguf(Gguf(kGolden / "tiny_gguf/gemma3_q4_0/model.gguf")); }),
             Catch::Contains("gemma3_q4_0") && Catch::Contains("SentencePiece"));
}
