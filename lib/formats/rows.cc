#include "formats/rows.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/hash.h"

namespace dspark::formats {

namespace {

constexpr std::pair<std::string_view, std::string_view> kRoleNames[] = {
    {"human", "user"}, {"gpt", "assistant"}, {"chatgpt", "assistant"}, {"bot", "assistant"}, {"model", "assistant"}};
constexpr std::string_view kKnownRoles[] = {"system", "developer", "user", "assistant", "tool", "function", "ipython"};

struct NotARow {
  RowError error;
};
[[noreturn]] void refuse(std::string reason, std::string detail) {
  throw NotARow{{std::move(reason), std::move(detail)}};
}

bool is_text(const OrderedJson& object, const char* key) { return object.contains(key) && object.at(key).is_string(); }

// {"role", "content", ...} from either spelling; everything else in the message stays.
OrderedJson read_message(const OrderedJson& message, size_t index) {
  if (!message.is_object()) refuse("broken message", fmt::format("message {} is not an object", index));
  const char* role_key = message.contains("role") ? "role" : "from";
  const char* content_key = message.contains("content") ? "content" : "value";
  if (!is_text(message, role_key)) refuse("broken message", fmt::format("message {} has no role", index));
  auto role = message.at(role_key).get<std::string>();
  for (const auto& [name, canonical] : kRoleNames)
    if (role == name) role = canonical;
  const bool calls =
      message.contains("tool_calls") && message.at("tool_calls").is_array() && !message.at("tool_calls").empty();
  const bool empty = !message.contains(content_key) || message.at(content_key).is_null();
  if (empty && !calls) refuse("broken message", fmt::format("message {} ({}) has no content", index, role));
  if (!empty && !message.at(content_key).is_string() && !message.at(content_key).is_array())
    refuse("broken message", fmt::format("message {} ({}): content is neither text nor a list of parts", index, role));
  OrderedJson out = OrderedJson::object();
  for (const auto& [key, value] : message.items()) {
    if (key == role_key)
      out["role"] = role;
    else if (key == content_key)
      out["content"] = value;
    else
      out[key] = value;
  }
  return out;
}

void read_conversation(const OrderedJson& root, const OrderedJson& list, Row& row) {
  if (!list.is_array()) refuse("broken conversation", "its messages are not a list");
  if (list.empty()) refuse("empty conversation", "it has no messages");
  OrderedJson messages = OrderedJson::array();
  for (size_t i = 0; i < list.size(); ++i) messages.push_back(read_message(list[i], i));
  if (is_text(root, "system") && !root.at("system").get_ref<const std::string&>().empty() &&
      messages[0].at("role") != "system")
    messages.insert(messages.begin(), OrderedJson{{"role", "system"}, {"content", root.at("system")}});
  if (root.contains("tools") && !root.at("tools").is_null()) {
    OrderedJson tools = root.at("tools");
    if (tools.is_string()) {
      const auto text = tools.get<std::string>();
      tools = text.empty() ? OrderedJson::array() : OrderedJson::parse(text, nullptr, false);
    }
    if (!tools.is_array()) refuse("broken conversation", "tools is not a list");
    if (!tools.empty()) row.tools = std::make_shared<const OrderedJson>(std::move(tools));
  }
  row.kind = Row::Kind::conversation;
  row.messages = std::make_shared<const OrderedJson>(std::move(messages));
}

void read_tokens(const OrderedJson& root, Row& row) {
  const OrderedJson& ids = root.at("input_ids");
  if (!root.contains("loss_mask")) refuse("broken token row", "input_ids without loss_mask");
  const OrderedJson& mask = root.at("loss_mask");
  if (!ids.is_array() || !mask.is_array()) refuse("broken token row", "input_ids or loss_mask is not a list");
  if (ids.size() != mask.size())
    refuse("broken token row", fmt::format("{} input_ids but {} loss_mask values", ids.size(), mask.size()));
  if (ids.empty()) refuse("empty token row", "it has no tokens");
  row.kind = Row::Kind::tokens;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!ids[i].is_number_integer() || ids[i].get<int64_t>() < 0 || ids[i].get<int64_t>() > INT32_MAX)
      refuse("broken token row", fmt::format("input_ids[{}] is {}", i, ids[i].dump()));
    const bool one = mask[i] == 1 || mask[i] == true;
    if (!one && mask[i] != 0 && mask[i] != false)
      refuse("broken token row", fmt::format("loss_mask[{}] is {}, expected 0 or 1", i, mask[i].dump()));
    row.ids.push_back(ids[i].get<int32_t>());
    row.mask.push_back(one);
  }
}

void read_row(const OrderedJson& root, Row& row) {
  if (!root.is_object()) refuse("not a JSON object", fmt::format("it is a {}", root.type_name()));
  if (root.contains("id"))
    row.name = root.at("id").is_string() ? root.at("id").get<std::string>() : root.at("id").dump();
  if (root.contains("input_ids")) return read_tokens(root, row);
  for (const char* key : {"messages", "conversations"})
    if (root.contains(key)) return read_conversation(root, root.at(key), row);
  if (root.contains("turns")) {
    const OrderedJson& turns = root.at("turns");
    if (!turns.is_array() || turns.empty()) refuse("empty prompts", "turns is not a list of texts");
    for (const OrderedJson& turn : turns) {
      if (!turn.is_string()) refuse("broken prompts", "turns holds something that is not text");
      row.prompts.push_back(turn.get<std::string>());
    }
    row.kind = Row::Kind::prompts;
    return;
  }
  if (is_text(root, "prompt")) {
    if (!root.contains("response") || root.at("response").is_null()) {
      row.kind = Row::Kind::prompts;
      row.prompts.push_back(root.at("prompt").get<std::string>());
      return;
    }
    if (!root.at("response").is_string()) refuse("broken conversation", "response is not text");
    const OrderedJson list = {{{"role", "user"}, {"content", root.at("prompt")}},
                              {{"role", "assistant"}, {"content", root.at("response")}}};
    return read_conversation(root, list, row);
  }
  refuse("unknown dialect", "none of messages, conversations, turns, prompt, input_ids is there");
}

}  // namespace

uint64_t conversation_id(std::string_view text) { return std::stoull(sha256_hex(text).substr(0, 16), nullptr, 16); }

uint64_t conversation_id(const Row& row) {
  // Not the tools nor a message's other keys (ids, times, weights): with them two copies of one text could part. Json
  // sorts the keys of a content that is a list of parts.
  Json content = Json::array();
  if (row.kind == Row::Kind::conversation)
    for (const OrderedJson& m : *row.messages)
      content.push_back(Json::array({m.at("role"), m.value("content", OrderedJson())}));
  else if (row.kind == Row::Kind::prompts)
    content = row.prompts;
  else
    content = row.ids;
  return conversation_id(content.dump(-1, ' ', false, Json::error_handler_t::replace));
}

bool is_known_role(std::string_view role) {
  return std::find(std::begin(kKnownRoles), std::end(kKnownRoles), role) != std::end(kKnownRoles);
}

std::optional<Row> parse_row(std::string_view line, RowError& error) {
  Row row;
  try {
    const OrderedJson root = OrderedJson::parse(line);
    read_row(root, row);
    return row;
  } catch (const NotARow& e) {
    error = e.error;
  } catch (const nlohmann::json::exception& e) {
    error = {"not JSON", json_error(e)};
  }
  return std::nullopt;
}

void count_reason(RowReport::Reason& reason, bool strict, std::string_view where, std::string_view what,
                  std::string_view detail) {
  const std::string text = fmt::format("{}: {}{}{}", where, what, detail.empty() ? "" : ": ", detail);
  DS_REQUIRE(!strict, "{} (strict)", text);
  if (reason.count++ == 0) reason.first = text;
}

uint64_t RowReport::dropped_lines() const {
  uint64_t n = 0;
  for (const auto& [name, reason] : dropped) n += reason.count;
  return n;
}

std::string RowReport::table() const {
  std::string out;
  auto line = [&](std::string_view name, uint64_t count, std::string_view note) {
    out += fmt::format("  {:<34} {:>10}  {}", name, count, note);
    out.erase(out.find_last_not_of(' ') + 1);
    out += '\n';
  };
  line("lines read", lines, "");
  line("lines used", used, "");
  if (prompts) line("prompts to answer", prompts, "");
  if (rows)
    line("rows", rows,
         fmt::format("{} tokens, {} in the loss ({:.1f} %)", tokens, loss_tokens,
                     tokens ? 100.0 * static_cast<double>(loss_tokens) / static_cast<double>(tokens) : 0.0));
  if (split) line("  split, one row per answer", split, "the template changes earlier turns");
  if (cut.count) line("  cut at the length limit", cut.count, "first: " + cut.first);
  if (borders) line("  answer borders inside a token", borders, "those tokens are not in the loss");
  for (const auto& [role, reason] : unknown_roles)
    line(fmt::format("  unknown role '{}', masked", role), reason.count, "first: " + reason.first);
  line("lines dropped", dropped_lines(), "");
  for (const auto& [name, reason] : dropped) line("  " + name, reason.count, "first: " + reason.first);
  return out;
}

RowReader::RowReader(std::vector<fs::path> files, RowOptions options, RowReport& report)
    : files_(std::move(files)), options_(options), report_(report) {
  // Hours of work should not end at the last file's name.
  for (const fs::path& file : files_) {
    DS_REQUIRE(fs::exists(file), "{}: no such file", file.string());
    DS_REQUIRE(fs::is_regular_file(file) || fs::is_fifo(file) || fs::is_character_file(file), "{}: not a file of rows",
               file.string());
    std::FILE* f = std::fopen(file.c_str(), "rb");
    DS_REQUIRE(f, "cannot open {}: {}", file.string(), errno_text());
    std::fclose(f);
  }
}

RowReader::~RowReader() {
  if (stream_) std::fclose(stream_);
}

// The next line without its end, into line_; only the first max_line_bytes of it are kept.
bool RowReader::read_line() {
  while (file_ < files_.size()) {
    if (!stream_) {
      stream_ = std::fopen(path().c_str(), "rb");
      DS_REQUIRE(stream_, "cannot open {}: {}", path().string(), errno_text());
      line_number_ = 0;
    }
    line_.clear();
    too_long_ = false;
    bool any = false;
    int c;
    while ((c = getc_unlocked(stream_)) != EOF) {
      any = true;
      if (c == '\n') break;
      if (line_.size() < options_.max_line_bytes)
        line_ += static_cast<char>(c);
      else
        too_long_ = true;
    }
    DS_REQUIRE(!std::ferror(stream_), "cannot read {} after line {}: {}", path().string(), line_number_, errno_text());
    if (any) {
      ++line_number_;
      if (!line_.empty() && line_.back() == '\r') line_.pop_back();
      if (line_number_ == 1 && line_.starts_with("\xEF\xBB\xBF")) line_.erase(0, 3);
      return true;
    }
    std::fclose(stream_);
    stream_ = nullptr;
    ++file_;
  }
  return false;
}

std::string first_user_turn(const Row& row) {
  if (row.kind == Row::Kind::prompts) return row.prompts.front();
  if (row.kind == Row::Kind::conversation)
    for (const OrderedJson& m : *row.messages)
      if (m.value("role", "") == "user" && m.contains("content") && m.at("content").is_string() && !m.at("content").get_ref<const std::string&>().empty()) return m.at("content");
  return "";
}

std::optional<Row> RowReader::next() {
  while (read_line()) {
    ++report_.lines;
    const std::string where = fmt::format("{}:{}", path().string(), line_number_);
    RowError error;
    std::optional<Row> row;
    if (too_long_) {
      error = {"line too long", fmt::format("more than {} bytes", options_.max_line_bytes)};
    } else if (line_.find_first_not_of(" \t\r\n") == std::string::npos) {
      error = {"empty line", ""};
    } else {
      row = parse_row(line_, error);
    }
    if (row) {
      row->where = where;
      return row;
    }
    count_reason(report_.dropped[error.reason], options_.strict, where, error.reason, error.detail);
  }
  return std::nullopt;
}

}  // namespace dspark::formats
