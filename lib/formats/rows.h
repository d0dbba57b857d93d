// Rows: conversations, prompts and token rows as people keep them, one JSON object a line.
//
// A RowReader streams files line by line and turns every dialect into one `Row`. What it can't use it counts in a
// RowReport, with the reason and the first place; `strict` makes the same thing an Error that names path and line.
// The report goes on to whoever turns rows into tokens (loss_mask.h) and is printed once, at the end.
//
//   {"messages": [{"role": "user", "content": "Hi"}, ...]}          also "conversations", and from/value in either
//   {"prompt": "Hi", "response": "Hello"}                            a prompt alone is one prompt
//   {"turns": ["Hi", "And now?"]}                                    prompts only
//   {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}                 tokens as they are
//
// Beside messages: "tools" (a list, or a string that holds one) goes to the template; "system" is a first message.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/files.h"
#include "core/json.h"

namespace dspark::formats {

struct Row {
  enum class Kind { conversation, prompts, tokens };
  Kind kind = Kind::conversation;
  std::string where;  // "path:line"
  std::string name;   // the row's own "id", "" when it has none
  // conversation: a list of messages as they stood there (tool calls and all), with `role` and `content` spelled so.
  std::shared_ptr<const OrderedJson> messages;
  std::shared_ptr<const OrderedJson> tools;  // null: none
  std::vector<std::string> prompts;          // prompts: the user's turns, in order
  std::vector<int32_t> ids;                  // tokens
  std::vector<uint8_t> mask;                 // tokens: 0 or 1, as many as ids
};

// What a model is to answer: the first prompt, or the first user message with text; "" when there is none.
std::string first_user_turn(const Row& row);

// Counts of one reading, for the closing table. Plain data; not thread-safe.
struct RowReport {
  struct Reason {
    uint64_t count = 0;
    std::string first;  // "path:line: detail" of the first one
  };
  uint64_t lines = 0;  // read
  uint64_t used = 0;   // lines that became at least one token row (or prompt)
  uint64_t prompts = 0;  // of the used lines: what a target is to answer
  uint64_t rows = 0;     // token rows made of the others
  uint64_t tokens = 0, loss_tokens = 0;
  uint64_t split = 0;    // conversations that became one row per answer (the template changes what came before)
  uint64_t borders = 0;  // answers that begin or end inside a token, which is then left out of the loss
  Reason cut;            // rows longer than the limit
  std::map<std::string, Reason> dropped;        // lines, by reason
  std::map<std::string, Reason> unknown_roles;  // messages, by role: part of the row, never of the loss

  uint64_t dropped_lines() const;
  // A few lines of text with every count that is not zero.
  std::string table() const;
};

// Adds one to a reason, or with `strict` throws "where: reason: detail".
void count_reason(RowReport::Reason& reason, bool strict, std::string_view where, std::string_view what,
                  std::string_view detail);

struct RowOptions {
  bool strict = false;
  uint64_t max_line_bytes = uint64_t{256} << 20;
};

class RowReader {
 public:
  // Throws when a file can't be opened (all are tried at once). `report` must outlive the reader.
  RowReader(std::vector<fs::path> files, RowOptions options, RowReport& report);
  ~RowReader();
  RowReader(const RowReader&) = delete;
  RowReader& operator=(const RowReader&) = delete;

  std::optional<Row> next();  // nothing: the end of the last file

 private:
  bool read_line();
  fs::path path() const { return files_[file_]; }

  std::vector<fs::path> files_;
  RowOptions options_;
  RowReport& report_;
  size_t file_ = 0;
  std::FILE* stream_ = nullptr;
  uint64_t line_number_ = 0;
  std::string line_;
  bool too_long_ = false;
};

// One line's row, or why it is none: `error` is set to {reason, detail}.
struct RowError {
  std::string reason, detail;
};
std::optional<Row> parse_row(std::string_view line, RowError& error);

// What the token rows of one conversation have in common wherever and however often it stands in the data: the first
// 8 bytes of SHA-256 over the roles and contents of its messages, or over a token row's ids.
uint64_t conversation_id(const Row& row);
// The same of one text (a question that is to be answered).
uint64_t conversation_id(std::string_view text);

// Whether a role is one that templates know; "human", "gpt" and the like are already user and assistant in a Row.
bool is_known_role(std::string_view role);

}  // namespace dspark::formats
