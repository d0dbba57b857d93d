#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <functional>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "formats/chat_template.h"
#include "formats/loss_mask.h"
#include "formats/rows.h"
#include "formats/tokenizer.h"
#include "golden.h"
#include "scratch.h"

using namespace dspark;
using namespace dspark::formats;

namespace {

const fs::path kGolden = fs::path(DSPARK_SOURCE_DIR) / "tests/golden/target";

std::vector<Row> read_all(const std::vector<fs::path>& files, RowReport& report, RowOptions options = {}) {
  RowReader reader(files, options, report);
  std::vector<Row> rows;
  while (auto row = reader.next()) rows.push_back(std::move(*row));
  return rows;
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& e) {
    return e.what();
  }
  return "(nothing was thrown)";
}

fs::path model_path(const char* name) {
  const char* cache = std::getenv("DSPARK_MODEL_CACHE");
  const char* home = std::getenv("HOME");
  const fs::path path = (cache ? fs::path(cache) : fs::path(home ? home : ".") / ".cache/dspark") / name;
  INFO(path.string() << " is missing: `make model` fetches it, or set DSPARK_MODEL_CACHE to the folder that holds it");
  REQUIRE(fs::exists(path));
  return path;
}

OrderedJson parse(const char* text) { return OrderedJson::parse(text); }

Row conversation(const char* messages) {
  RowError error;
  auto row = parse_row(fmt::format(R"({{"messages": {}}})", messages), error);
  INFO(error.reason << ": " << error.detail);
  REQUIRE(row);
  row->where = "test:1";
  return *row;
}

// The fixtures keep long templates as lists of lines.
std::string template_text(const OrderedJson& text) {
  if (text.is_string()) return text.get<std::string>();
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) out += (i ? "\n" : "") + text[i].get<std::string>();
  return out;
}

// The small GPT-2 vocabulary and some control tokens.
Tokenizer tokenizer_with(const std::vector<std::string>& control) {
  TokenizerData data = read_tokenizer_json(kGolden / "tokenizer_small_gpt2/tokenizer.json");
  for (const auto& name : control) {
    data.tokens.push_back(name);
    data.types.push_back(TokenType::control);
  }
  return Tokenizer(std::move(data));
}

std::string content(const OrderedJson& message) {
  return message.contains("content") && message.at("content").is_string() ? message.at("content").get<std::string>()
                                                                          : "";
}

// Templates, written out: what the engine's tests do with real ones, these do to the spans.
std::string chatml(const OrderedJson& messages, const OrderedJson*, bool prompt) {
  std::string out;
  for (const auto& m : messages) {
    out += "<|im_start|>" + m.at("role").get<std::string>() + "\n" + content(m);
    if (m.contains("tool_calls")) out += "<tool_call>" + m.at("tool_calls").dump() + "</tool_call>";
    out += "<|im_end|>\n";
  }
  return prompt ? out + "<|im_start|>assistant\n" : out;
}
std::string chatml_without_prompt(const OrderedJson& messages, const OrderedJson* tools, bool) {
  return chatml(messages, tools, false);
}
std::string llama3(const OrderedJson& messages, const OrderedJson*, bool prompt) {
  std::string out = "<|begin_of_text|>";
  for (const auto& m : messages)
    out +=
        "<|start_header_id|>" + m.at("role").get<std::string>() + "<|end_header_id|>\n\n" + content(m) + "<|eot_id|>";
  return prompt ? out + "<|start_header_id|>assistant<|end_header_id|>\n\n" : out;
}
std::string mistral(const OrderedJson& messages, const OrderedJson*, bool) {
  std::string out = "<s>";
  for (const auto& m : messages)
    out += m.at("role") == "user" ? "[INST] " + content(m) + " [/INST]" : " " + content(m) + "</s>";
  return out;
}
std::string plain(const OrderedJson& messages, const OrderedJson*, bool prompt) {  // no end token at all
  std::string out;
  for (const auto& m : messages) out += (m.at("role") == "user" ? "Q:\n" : "A:\n") + content(m) + "\n\n";
  return prompt ? out + "A:\n" : out;
}
// Qwen3's manner: only the last answer keeps its thinking.
std::string qwen3(const OrderedJson& messages, const OrderedJson*, bool prompt) {
  std::string out;
  for (size_t i = 0; i < messages.size(); ++i) {
    std::string text = content(messages[i]);
    if (const size_t end = text.find("</think>\n\n"); end != std::string::npos && i + 1 < messages.size())
      text = text.substr(end + 10);
    out += "<|im_start|>" + messages[i].at("role").get<std::string>() + "\n" + text + "<|im_end|>\n";
  }
  return prompt ? out + "<|im_start|>assistant\n" : out;
}
// A prompt that opens the thinking; answers without any are written without it.
std::string r1(const OrderedJson& messages, const OrderedJson*, bool prompt) {
  const std::string out = chatml(messages, nullptr, prompt);
  return prompt ? out + "<think>\n" : out;
}

// The text in the loss, "|" between answers' tokens that are not neighbours.
std::string in_loss(const TokenRow& row, const Tokenizer& tokenizer) {
  std::string out;
  for (size_t i = 0; i < row.ids.size(); ++i) {
    if (row.mask[i])
      out += tokenizer.piece(row.ids[i]);
    else if (i && row.mask[i - 1])
      out += '|';
  }
  return out;
}

std::vector<std::string> losses(const char* messages, const Tokenizer& tokenizer, const Render& render) {
  RowReport report;
  std::vector<std::string> out;
  for (const TokenRow& row : make_token_rows(conversation(messages), tokenizer, render, {}, report))
    out.push_back(in_loss(row, tokenizer));
  return out;
}

// Every row of one case; returns how many differ.
int check_loss_masks(const golden::Case& golden_case, const Tokenizer& t) {
  const OrderedJson golden = OrderedJson::parse(read_text(golden_case.folder / "case.json"));
  int wrong = 0;
  // The template is the one in the model's file.
  CHECK(template_text(golden.at("template")) == t.chat_template());
  const ChatTemplate chat(template_text(golden.at("template")), "SmolLM2");
  const Render render = chat_renderer(chat, t);
  auto ids_of = [](const OrderedJson& row) { return row.at("ids").get<std::vector<int32_t>>(); };
  auto mask_of = [](const OrderedJson& row) { return row.at("mask").get<std::vector<uint8_t>>(); };
  for (const OrderedJson& c : golden.at("rows")) {
    INFO(c.at("name"));
    const OrderedJson& messages = c.at("messages");
    const auto rendered = render_conversation(messages, nullptr, render, t);
    REQUIRE(rendered.size() == 1);
    CHECK(rendered[0].text == c.at("text").get<std::string>());
    CHECK(rendered[0].turn == -1);
    uint64_t borders = 0;
    const TokenRow row = mask_tokens(rendered[0], t, &borders);
    wrong += row.ids != ids_of(c) || row.mask != mask_of(c);
    CHECK(row.ids == ids_of(c));
    CHECK(row.mask == mask_of(c));
    CHECK(borders == c.at("span_edges_inside_a_token").get<uint64_t>());
    if (c.contains("prompt_ids_of_first_answer") && !c.at("prompt_ids_of_first_answer").is_null()) {
      OrderedJson before = OrderedJson::array();
      for (const OrderedJson& m : messages) {
        if (m.at("role") == "assistant") break;
        before.push_back(m);
      }
      CHECK(prompt_ids(before, nullptr, render, t) == c.at("prompt_ids_of_first_answer").get<std::vector<int32_t>>());
    }
    // The same through a row, with its counts.
    RowError error;
    auto line = parse_row(OrderedJson{{"messages", messages}}.dump(), error);
    REQUIRE(line);
    RowReport report;
    const auto rows = make_token_rows(*line, t, render, {}, report);
    if (c.at("spans").empty()) {
      CHECK(rows.empty());
      CHECK(report.dropped.at("no answer").count == 1);
    } else {
      REQUIRE(rows.size() == 1);
      CHECK(rows[0].ids == ids_of(c));
      CHECK(rows[0].mask == mask_of(c));
      CHECK(report.used == 1);
    }
  }
  const fs::path beside = golden_case.folder.parent_path() / "chat_templates/case.json";
  const OrderedJson templates =
      OrderedJson::parse(read_text(fs::exists(beside) ? beside : kGolden / "chat_templates/case.json"));
  const ChatTemplate qwen3(template_text(templates.at("templates").at("qwen3_style")), "qwen3_style");
  const Render qwen3_render = chat_renderer(qwen3, t);
  for (const OrderedJson& c : golden.at("unstable")) {
    const auto name = c.at("messages").get<std::string>();
    INFO(name);
    const OrderedJson& messages = templates.at("conversations").at(name);
    CHECK(qwen3_render(messages, nullptr, false) == c.at("whole_text").get<std::string>());
    const auto rendered = render_conversation(messages, nullptr, qwen3_render, t);
    REQUIRE(rendered.size() == c.at("rows").size());
    for (size_t i = 0; i < rendered.size(); ++i) {
      const OrderedJson& expected = c.at("rows")[i];
      CHECK(rendered[i].turn == expected.at("turn").get<int64_t>());
      CHECK(rendered[i].text == expected.at("text").get<std::string>());
      const TokenRow row = mask_tokens(rendered[i], t);
      wrong += row.ids != ids_of(expected) || row.mask != mask_of(expected);
      CHECK(row.ids == ids_of(expected));
      CHECK(row.mask == mask_of(expected));
    }
  }
  return wrong;
}

using Texts = std::vector<std::string>;
constexpr const char* kTwoTurns = R"([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "One."},
                                      {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Two."}])";

}  // namespace

TEST_CASE("rows: every dialect gives the same conversation", "[rows]") {
  const OrderedJson expected = parse(R"([{"role":"user","content":"Hi"},{"role":"assistant","content":"Yes"}])");
  RowError error;
  for (const char* line :
       {R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]})",
        R"({"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]})",
        R"({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]})",
        R"({"messages": [{"from": "user", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]})",
        R"({"prompt": "Hi", "response": "Yes"})"}) {
    const auto row = parse_row(line, error);
    INFO(line << " " << error.reason << " " << error.detail);
    REQUIRE(row);
    CHECK(row->kind == Row::Kind::conversation);
    CHECK(*row->messages == expected);
    CHECK_FALSE(row->tools);
  }
  auto row = parse_row(R"({"id": 17, "turns": ["a", "b"]})", error);
  REQUIRE(row);
  CHECK(row->kind == Row::Kind::prompts);
  CHECK(row->prompts == Texts{"a", "b"});
  CHECK(row->name == "17");
  row = parse_row(R"({"id": "x", "prompt": "a"})", error);
  REQUIRE(row);
  CHECK(row->prompts == Texts{"a"});
  row = parse_row(R"({"input_ids": [5, 0, 7], "loss_mask": [0, 1, true]})", error);
  REQUIRE(row);
  CHECK(row->kind == Row::Kind::tokens);
  CHECK(row->ids == std::vector<int32_t>{5, 0, 7});
  CHECK(row->mask == std::vector<uint8_t>{0, 1, 1});
  row = parse_row(R"({"system": "S", "tools": "[{\"a\": 1}]", "conversations": [{"from": "human", "value": "Hi"}]})",
                  error);
  REQUIRE(row);
  CHECK((*row->messages)[0] == parse(R"({"role": "system", "content": "S"})"));
  REQUIRE(row->tools);
  CHECK(*row->tools == parse(R"([{"a": 1}])"));
}

TEST_CASE("rows: tool calls and other keys of a message stay", "[rows]") {
  // CASES 14: an assistant message with tool_calls and no content is kept whole.
  const Row row = conversation(R"([{"role": "user", "content": "x"}, {"role": "assistant", "content": null,
      "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": 2}}}]},
      {"role": "tool", "tool_call_id": "1", "content": "3"}, {"role": "assistant", "reasoning_content": "r", "content": "done"}])");
  CHECK(
      (*row.messages)[1].dump() ==
      R"({"role":"assistant","content":null,"tool_calls":[{"type":"function","function":{"name":"f","arguments":{"z":1,"a":2}}}]})");
  CHECK((*row.messages)[2].at("tool_call_id") == "1");
  CHECK((*row.messages)[3].at("reasoning_content") == "r");
  const Tokenizer t = tokenizer_with({"<|im_start|>", "<|im_end|>"});
  RowReport report;
  const auto rows = make_token_rows(row, t, chatml, {}, report);
  REQUIRE(rows.size() == 1);
  CHECK_THAT(in_loss(rows[0], t), Catch::StartsWith("<tool_call>[{") && Catch::EndsWith("|done<|im_end|>|"));
  CHECK(report.unknown_roles.empty());
}

TEST_CASE("rows: what can't be used is counted with its reason and place", "[rows]") {
  const Scratch scratch;
  const fs::path file = scratch.put("rows.jsonl",
                                    "\xEF\xBB\xBF{\"prompt\": \"a\", \"response\": \"b\"}\r\n"
                                    "{\"prompt\": \"a\", \n"
                                    "\n"
                                    "[1, 2]\n"
                                    "{\"text\": \"a\"}\n"
                                    "{\"messages\": []}\n"
                                    "{\"messages\": [{\"role\": \"user\"}]}\n"
                                    "{\"messages\": [{\"content\": \"x\"}]}\n"
                                    "{\"messages\": \"x\"}\n"
                                    "{\"input_ids\": [1, 2], \"loss_mask\": [1]}\n"
                                    "{\"input_ids\": [1, -2], \"loss_mask\": [1, 1]}\n"
                                    "{\"input_ids\": [1, 2], \"loss_mask\": [1, 2]}\n"
                                    "{\"input_ids\": [1, 4294967296], \"loss_mask\": [1, 1]}\n"
                                    "{\"input_ids\": [], \"loss_mask\": []}\n"
                                    "{\"turns\": [1]}\n"
                                    "{\"prompt\": \"\xFF\", \"response\": \"b\"}\n"
                                    "{\"prompt\": \"last\", \"response\": \"without a newline\"}");
  RowReport report;
  const auto rows = read_all({file}, report);
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].where == file.string() + ":1");
  CHECK(rows[1].where == file.string() + ":17");
  CHECK(report.lines == 17);
  CHECK(report.dropped_lines() == 15);
  CHECK(report.dropped.at("not JSON").count == 2);
  CHECK(report.dropped.at("empty line").count == 1);
  CHECK(report.dropped.at("not a JSON object").count == 1);
  CHECK(report.dropped.at("unknown dialect").count == 1);
  CHECK(report.dropped.at("empty conversation").count == 1);
  CHECK(report.dropped.at("broken message").count == 2);
  CHECK(report.dropped.at("broken conversation").count == 1);
  CHECK(report.dropped.at("broken token row").count == 4);
  CHECK(report.dropped.at("empty token row").count == 1);
  CHECK(report.dropped.at("broken prompts").count == 1);
  CHECK_THAT(report.dropped.at("broken token row").first, Catch::StartsWith(file.string() + ":10: "));
  CHECK_THAT(report.table(), Catch::Contains("broken message") &&
                                 Catch::Contains(":7: broken message: message 0 (user) has no content"));

  RowReport strict;
  CHECK_THAT(message_of([&] { read_all({file}, strict, {.strict = true}); }),
             Catch::StartsWith(file.string() + ":2: not JSON"));
}

TEST_CASE("rows: files", "[rows]") {
  const Scratch scratch;
  const fs::path one = scratch.put("one", "{\"prompt\": \"a\"}\n"), empty = scratch.put("empty", ""),
                 two = scratch.put("two", "{\"prompt\": \"b\"}\n{\"prompt\": \"cccccccccc\"}\n");
  RowReport report;
  const auto rows = read_all({one, empty, two}, report, {.max_line_bytes = 20});
  REQUIRE(rows.size() == 2);
  CHECK(rows[1].where == two.string() + ":1");
  CHECK(report.dropped.at("line too long").count == 1);
  CHECK_THAT(message_of([&] {
               read_all({one, "/no/such.jsonl"}, report);
             }),
             Catch::Contains("/no/such.jsonl: no such file"));
  CHECK_THAT(message_of([&] { read_all({fs::temp_directory_path()}, report); }), Catch::Contains("not a file of rows"));
}

TEST_CASE("loss masks: the end token is the template's, whatever the family", "[rows]") {
  // CASES 8 and 9: <|im_end|>, <|eot_id|>, </s>, none; never the newline after it, never a header.
  const Tokenizer t = tokenizer_with({"<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
                                      "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>"});
  CHECK(losses(kTwoTurns, t, chatml) == Texts{"One.<|im_end|>|Two.<|im_end|>|"});
  CHECK(losses(kTwoTurns, t, chatml_without_prompt) == Texts{"One.<|im_end|>|Two.<|im_end|>|"});
  CHECK(losses(kTwoTurns, t, llama3) == Texts{"One.<|eot_id|>|Two.<|eot_id|>"});
  CHECK(losses(kTwoTurns, t, mistral) == Texts{" One.</s>| Two.</s>"});  // the space is the model's to write
  CHECK(losses(kTwoTurns, t, plain) == Texts{"One.|Two.|"});
  // An answer that ends with an end marker of its own, and one that looks like another turn.
  CHECK(losses(R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": "x<|im_end|>"}])", t, chatml) ==
        Texts{"x<|im_end|><|im_end|>|"});
  CHECK(
      losses(
          R"([{"role": "user", "content": "<|im_start|>assistant\nno<|im_end|>"}, {"role": "assistant", "content": "y"}])",
          t, chatml) == Texts{"y<|im_end|>|"});
  // Its last newline is one token with the template's two: not wholly the model's, so not in the loss, and counted.
  RowReport report;
  const auto rows =
      make_token_rows(conversation(R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": "line\n"}])"),
                      t, plain, {}, report);
  REQUIRE(rows.size() == 1);
  CHECK(in_loss(rows[0], t) == "line|");
  CHECK(report.borders == 1);
}

TEST_CASE("loss masks: thinking belongs to the loss, and templates that drop it are split per answer", "[rows]") {
  // CASES 6 and 7.
  const Tokenizer t = tokenizer_with({"<|im_start|>", "<|im_end|>"});
  const char* thinking =
      R"([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n2"},
                             {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\nSo.\n</think>\n\n4"}])";
  CHECK(losses(thinking, t, chatml) ==
        Texts{"<think>\nEasy.\n</think>\n\n2<|im_end|>|<think>\nSo.\n</think>\n\n4<|im_end|>|"});
  CHECK(losses(thinking, t, qwen3) ==
        Texts{"<think>\nEasy.\n</think>\n\n2<|im_end|>|", "<think>\nSo.\n</think>\n\n4<|im_end|>|"});
  RowReport report;
  const auto rows = make_token_rows(conversation(thinking), t, qwen3, {}, report);
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].turn == 1);
  CHECK(rows[1].turn == 3);
  CHECK(rows[0].id != rows[1].id);
  CHECK(rows[0].conversation == rows[1].conversation);
  RowReport others;
  CHECK(rows[0].conversation == make_token_rows(conversation(thinking), t, chatml, {}, others)[0].conversation);
  CHECK(rows[0].conversation != make_token_rows(conversation(kTwoTurns), t, chatml, {}, others)[0].conversation);
  CHECK(t.decode(rows[1].ids) ==
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?"
        "<|im_end|>\n<|im_start|>assistant\n<think>\nSo.\n</think>\n\n4<|im_end|>\n");
  CHECK(report.split == 1);
  CHECK(report.used == 1);
  CHECK(report.rows == 2);
  // The prompt opens the thinking: an answer with it starts behind that, one without it behind the header.
  CHECK(losses(thinking, t, r1).size() == 1);
  CHECK_THAT(losses(thinking, t, r1)[0], Catch::StartsWith("Easy.\n</think>") && Catch::Contains("|So.\n"));
  CHECK(losses(R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": "<b>bold</b>"}])", t, r1) ==
        Texts{"<b>bold</b><|im_end|>|"});
}

TEST_CASE("loss masks: unknown roles are never trained on, and counted", "[rows]") {
  // CASES 11: {"from": "observation"} is not the assistant.
  RowError error;
  auto row = parse_row(R"({"conversations": [{"from": "human", "value": "go"}, {"from": "observation", "value": "x=1"},
                          {"from": "gpt", "value": "done"}]})",
                       error);
  REQUIRE(row);
  row->where = "f.jsonl:3";
  const Tokenizer t = tokenizer_with({"<|im_start|>", "<|im_end|>"});
  RowReport report;
  const auto rows = make_token_rows(*row, t, chatml, {}, report);
  REQUIRE(rows.size() == 1);
  CHECK(in_loss(rows[0], t) == "done<|im_end|>|");
  CHECK(report.unknown_roles.at("observation").count == 1);
  CHECK_THAT(report.table(), Catch::Contains("unknown role 'observation', masked"));
  CHECK_THAT(message_of([&] { make_token_rows(*row, t, chatml, {.strict = true}, report); }),
             Catch::StartsWith("f.jsonl:3: unknown role: 'observation'"));
}

TEST_CASE("loss masks: cut, dropped and counted", "[rows]") {
  const Tokenizer t = tokenizer_with({"<|im_start|>", "<|im_end|>"});
  const Row row = conversation(kTwoTurns);
  RowReport report;
  const auto whole = make_token_rows(row, t, chatml, {}, report);
  REQUIRE(whole.size() == 1);
  CHECK(report.tokens == whole[0].ids.size());
  CHECK(report.loss_tokens == static_cast<uint64_t>(std::count(whole[0].mask.begin(), whole[0].mask.end(), 1)));
  const auto n = static_cast<int64_t>(whole[0].ids.size());
  CHECK(make_token_rows(row, t, chatml, {.max_length = n}, report)[0].id == whole[0].id);
  CHECK(report.cut.count == 0);
  const auto cut = make_token_rows(row, t, chatml, {.max_length = n - 3}, report);
  REQUIRE(cut.size() == 1);
  CHECK(cut[0].ids == std::vector<int32_t>(whole[0].ids.begin(), whole[0].ids.end() - 3));
  CHECK(cut[0].mask.size() == cut[0].ids.size());
  CHECK(cut[0].id != whole[0].id);
  CHECK(report.cut.count == 1);
  CHECK(make_token_rows(row, t, chatml, {.max_length = 3}, report).empty());
  CHECK(report.dropped.at("no answer before the length limit").count == 1);
  CHECK_THAT(message_of([&] { make_token_rows(row, t, chatml, {.max_length = 3, .strict = true}, report); }),
             Catch::StartsWith("test:1: longer than the limit"));

  CHECK(make_token_rows(conversation(R"([{"role": "user", "content": "x"}])"), t, chatml, {}, report).empty());
  CHECK(report.dropped.at("no answer").count == 1);
  const Render refuses = [](const OrderedJson&, const OrderedJson*, bool) -> std::string {
    fail("roles must alternate");
  };
  CHECK(make_token_rows(row, t, refuses, {}, report).empty());
  CHECK_THAT(report.dropped.at("refused by the chat template").first, Catch::Contains("roles must alternate"));
  const Render nothing = [](const OrderedJson&, const OrderedJson*, bool) { return std::string(); };
  CHECK(make_token_rows(row, t, nothing, {}, report).empty());
  CHECK(report.dropped.at("no token in the loss").count == 1);

  Row tokens;
  tokens.kind = Row::Kind::tokens;
  tokens.where = "f:9";
  tokens.ids = {1, 2, 3};
  tokens.mask = {0, 1, 1};
  REQUIRE(make_token_rows(tokens, t, chatml, {}, report).size() == 1);
  tokens.ids[2] = t.size();
  CHECK(make_token_rows(tokens, t, chatml, {}, report).empty());
  CHECK(report.dropped.at("token id outside the vocabulary").count == 1);
}

TEST_CASE("content ids depend on ids and mask, and on nothing else", "[rows]") {
  const std::vector<int32_t> ids = {1, 2, 258};
  const std::vector<uint8_t> mask = {0, 1, 1};
  // sha256 of 01000000 02000000 02010000 00 01 01
  CHECK(row_id(ids, mask) == "3e3def0cac3aa4cc");
  CHECK(row_id(std::vector<int32_t>{1, 2, 259}, mask) != row_id(ids, mask));
  CHECK(row_id(ids, std::vector<uint8_t>{1, 1, 1}) != row_id(ids, mask));
}

TEST_CASE("conversation ids depend on what is said, not on how the row spells it", "[rows][conversation]") {
  auto id = [](const char* line) {
    RowError error;
    const auto row = parse_row(line, error);
    INFO(line << " " << error.reason << " " << error.detail);
    REQUIRE(row);
    return conversation_id(*row);
  };
  const uint64_t hello = id(R"({"prompt": "Hi", "response": "Yes"})");
  // The first 8 bytes of sha256 of [["user","Hi"],["assistant","Yes"]]
  CHECK(hello == 0x7e249a548a757be9);
  CHECK(
      id(R"({"id": 3, "conversations": [{"value": "Hi", "from": "human"}, {"from": "gpt", "value": "Yes", "weight": 1}]})") ==
      hello);
  CHECK(
      id(R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "id": "7"}], "tools": [{"a": 1}]})") ==
      hello);
  CHECK(id(R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]})") ==
        id(R"({"messages": [{"role": "user", "content": [{"text": "Hi", "type": "text"}]}]})"));
  for (const char* other :
       {R"({"prompt": "Hi", "response": "Yes."})", R"({"prompt": "HiYes", "response": ""})", R"({"prompt": "Hi"})",
        R"({"messages": [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Yes"}]})",
        R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [{}]}]})"}) {
    INFO(other);
    CHECK(id(other) != hello);
  }
  CHECK(id(R"({"input_ids": [1, 2], "loss_mask": [0, 1]})") == id(R"({"input_ids": [1, 2], "loss_mask": [1, 1]})"));
  CHECK(id(R"({"input_ids": [1, 2], "loss_mask": [0, 1]})") != id(R"({"input_ids": [12], "loss_mask": [1]})"));
}

TEST_CASE("loss masks: every row of the golden cases", "[rows][golden][model]") {
  const Tokenizer t = load_tokenizer(model_path("SmolLM2-135M-Instruct.Q4_1.gguf"));
  const auto cases = golden::cases("loss_masks");
  REQUIRE_FALSE(cases.empty());
  for (const golden::Case& c : cases) {
    golden::Report report("loss_masks", c.name);
    report.check("rows that differ", check_loss_masks(c, t), 0.5);
  }
}

TEST_CASE("loss masks: the families' real templates", "[rows]") {
  // CASES 8 and 9 on the templates themselves: what is in the loss of two plain answers.
  const OrderedJson templates = OrderedJson::parse(read_text(kGolden / "chat_templates/case.json")).at("templates");
  const Tokenizer t = tokenizer_with({"<|im_start|>",
                                      "<|im_end|>",
                                      "<|begin_of_text|>",
                                      "<|start_header_id|>",
                                      "<|end_header_id|>",
                                      "<|eot_id|>",
                                      "<s>",
                                      "</s>",
                                      "<bos>",
                                      "<start_of_turn>",
                                      "<end_of_turn>",
                                      "<｜end▁of▁sentence｜>",
                                      "<｜User｜>",
                                      "<｜Assistant｜>",
                                      "<|start|>",
                                      "<|end|>",
                                      "<|message|>",
                                      "<|channel|>",
                                      "<|return|>",
                                      "<|im_user|>",
                                      "<|im_assistant|>",
                                      "<|im_middle|>"});
  ChatOptions options;
  options.bos_token = "<s>";
  options.eos_token = "</s>";
  for (const auto& [name, expected] : std::vector<std::pair<const char*, Texts>>{
           {"smollm2", {"One.<|im_end|>|Two.<|im_end|>|"}},
           {"chatml", {"One.<|im_end|>|Two.<|im_end|>|"}},
           {"llama3_style", {"One.<|eot_id|>|Two.<|eot_id|>"}},
           {"mistral_style", {" One.</s>| Two.</s>"}},
           {"gemma_style", {"One.<end_of_turn>|Two.<end_of_turn>|"}},
           {"zephyr_style", {"One.</s>|Two.</s>|"}},
           // Its prompt opens a <think> that stored answers lack.
           {"deepseek_style", {"One.<｜end▁of▁sentence｜>|Two.<｜end▁of▁sentence｜>"}},
           // The model writes the channel too; only a last answer ends with <|return|>, so it is a row for each.
           {"harmony_style",
            {"<|channel|>final<|message|>One.<|return|>", "<|channel|>final<|message|>Two.<|return|>"}},
           {"kimi_style", {"<think></think>One.<|im_end|>|<think></think>Two.<|im_end|>"}},
       }) {
    INFO(name);
    const ChatTemplate chat(template_text(templates.at(name)), name);
    CHECK(losses(kTwoTurns, t, chat_renderer(chat, t, options)) == expected);
  }
}
