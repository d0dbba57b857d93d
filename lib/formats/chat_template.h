// Chat templates: the Jinja text that a model's files carry, and the text it makes of a conversation.
//
// A ChatTemplate is parsed once and immutable; any number of threads may render it. Rendering behaves as in Hugging
// Face's transformers (Jinja 3.1, sandboxed, trim_blocks and lstrip_blocks, loop controls, `generation` blocks,
// raise_exception, strftime_now, its tojson), down to how Python prints values. What this engine does not know is an
// error that names the construct and its line, never a different text. Templates come from files, so every rendering is
// bounded in time, memory and recursion.
//
//   ChatTemplate chat(gguf_template, path);
//   std::string prompt = chat.render(messages, {.add_generation_prompt = true, .bos_token = "<s>"});
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/json.h"

namespace dspark::formats {

// What a template or its input caused. what() reads "chat template 'NAME', line 3: 'x' is undefined".
class TemplateError : public Error {
 public:
  TemplateError(const std::string& name, int line, std::string kind, std::string message);
  // "raise_exception" (the template's own complaint about the conversation), "syntax", "undefined", "security",
  // "unsupported" (a construct this engine lacks), "limit", or the name of Python's error ("TypeError", ...).
  const std::string& kind() const { return kind_; }
  const std::string& message() const { return message_; }  // without the name and line
  int line() const { return line_; }

 private:
  std::string kind_, message_;
  int line_;
};

struct TemplateLimits {
  uint64_t max_steps = 10'000'000;        // evaluated nodes and visited elements; a second or two
  uint64_t max_bytes = 256ull << 20;      // text and lists made along the way, the result included
};

struct ChatOptions {
  bool add_generation_prompt = false;
  bool continue_final_message = false;    // leave the last message open: cut right after its content
  std::optional<std::string> bos_token = {}, eos_token = {};  // not defined in the template when absent
  const OrderedJson* tools = nullptr;     // lists; `none` in the template when absent
  const OrderedJson* documents = nullptr;
  const OrderedJson* variables = nullptr; // an object: further variables, such as {"enable_thinking": false}
  std::optional<std::tm> now = {};        // what strftime_now sees; the local time when absent
  TemplateLimits limits = {};
};

class ChatTemplate {
 public:
  // Parses `source`; `name` (a path, say) is for messages. Throws TemplateError.
  ChatTemplate(std::string source, std::string name);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  const std::string& source() const { return source_; }
  const std::string& name() const { return name_; }

  // The text of a conversation: a list of {"role", "content", ...}.
  std::string render(const OrderedJson& messages, const ChatOptions& options = {}) const;
  // The text of its first `count` messages.
  std::string render_prefix(const OrderedJson& messages, size_t count, const ChatOptions& options = {}) const;
  // What stands before the user's words when a user speaks first (or after `system`): a model given this text writes the
  // question itself (Magpie). Error when the template does not show the user's text exactly once.
  std::string user_prefix(const ChatOptions& options = {}, std::optional<std::string_view> system = {}) const;
  // The template over any variables (an object).
  std::string render_variables(const OrderedJson& variables, const ChatOptions& options = {}) const;

 private:
  struct Parsed;
  std::string source_, name_;
  std::unique_ptr<Parsed> parsed_;
};

}  // namespace dspark::formats
