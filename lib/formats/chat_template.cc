#include "formats/chat_template.h"

#include <nlohmann/json.hpp>

#include "formats/jinja_eval.h"
#include "formats/jinja_parser.h"
#include "formats/jinja_text.h"

namespace dspark::formats {

namespace {

// Text that no template treats specially: letters only, nothing to trim, escape or split at.
constexpr std::string_view kSentinel = "QzUserTextHereXv";
constexpr std::string_view kContinueTag = "CONTINUE_FINAL_MESSAGE_TAG ";

std::string error_text(const std::string& name, int line, const std::string& kind, const std::string& message) {
  const std::string where = fmt::format("chat template '{}', line {}: ", name, line);
  if (kind == "raise_exception") return where + "the template refuses this conversation: " + message;
  if (kind == "unsupported") return where + message + " is not supported by this template engine";
  return where + message;
}

std::tm local_time() {
  const std::time_t seconds = std::time(nullptr);
  std::tm out{};
  localtime_r(&seconds, &out);
  return out;
}

// Appends the tag to the last message's text, as transformers does for continue_final_message; returns that text.
std::string tag_final_message(OrderedJson& messages) {
  DS_REQUIRE(!messages.empty() && messages.back().is_object() && messages.back().contains("content"),
             "continue_final_message: the conversation has no last message with content");
  OrderedJson& content = messages.back()["content"];
  OrderedJson* text = &content;
  if (content.is_array()) {
    text = nullptr;
    for (auto& part : content)
      if (part.is_object() && part.contains("text")) text = &part["text"];
  }
  DS_REQUIRE(text != nullptr && text->is_string(), "continue_final_message: the last message has no text to continue");
  const std::string original = text->get<std::string>();
  *text = original + std::string(kContinueTag);
  return original;
}

}  // namespace

struct ChatTemplate::Parsed {
  jinja::Ast ast;
};

TemplateError::TemplateError(const std::string& name, int line, std::string kind, std::string message)
    : Error(error_text(name, line, kind, message)), kind_(std::move(kind)), message_(std::move(message)), line_(line) {}

ChatTemplate::ChatTemplate(std::string source, std::string name) : source_(std::move(source)), name_(std::move(name)) {
  try {
    parsed_ = std::make_unique<Parsed>(Parsed{jinja::parse_template(source_)});
  } catch (const jinja::SyntaxError& error) {
    throw TemplateError(name_, error.line, error.kind, error.message);
  }
}
ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

std::string ChatTemplate::render_variables(const OrderedJson& variables, const ChatOptions& options) const {
  DS_REQUIRE(variables.is_object(), "chat template '{}': the variables must be a JSON object, found {}", name_,
             variables.type_name());
  try {
    jinja::Meter meter(options.limits.max_steps, options.limits.max_bytes);
    const jinja::Value context = jinja::from_json(variables, meter);
    jinja::Interp interp(parsed_->ast, meter, options.now ? *options.now : local_time());
    return interp.render(context);
  } catch (const jinja::PyError& error) {
    throw TemplateError(name_, error.line, error.kind, error.message);
  }
}

std::string ChatTemplate::render(const OrderedJson& messages, const ChatOptions& options) const {
  DS_REQUIRE(messages.is_array(), "chat template '{}': a conversation is a list of messages, found {}", name_,
             messages.type_name());
  DS_REQUIRE(!(options.add_generation_prompt && options.continue_final_message),
             "chat template '{}': add_generation_prompt and continue_final_message exclude each other", name_);
  OrderedJson variables = OrderedJson::object();
  variables["messages"] = messages;
  variables["tools"] = options.tools ? *options.tools : OrderedJson();
  variables["documents"] = options.documents ? *options.documents : OrderedJson();
  variables["add_generation_prompt"] = options.add_generation_prompt;
  if (options.bos_token) variables["bos_token"] = *options.bos_token;
  if (options.eos_token) variables["eos_token"] = *options.eos_token;
  if (options.variables) {
    DS_REQUIRE(options.variables->is_object(), "chat template '{}': further variables must be a JSON object", name_);
    for (const auto& [key, value] : options.variables->items()) variables[key] = value;
  }
  if (!options.continue_final_message) return render_variables(variables, options);

  const std::string original = tag_final_message(variables["messages"]);
  std::string text = render_variables(variables, options);
  const std::string_view tag = jinja::strip(kContinueTag, true, true);
  const size_t at = text.rfind(tag);
  const bool shown = text.find(jinja::strip(original, true, true)) != std::string::npos;
  DS_REQUIRE(shown && at != std::string::npos,
             "chat template '{}': the last message does not appear in the rendered text, so it cannot be continued", name_);
  const bool keeps_space = text.compare(at, kContinueTag.size(), kContinueTag) == 0;
  text.resize(at);
  return keeps_space ? text : std::string(jinja::strip(text, false, true));
}

std::string ChatTemplate::render_prefix(const OrderedJson& messages, size_t count, const ChatOptions& options) const {
  DS_REQUIRE(messages.is_array() && count <= messages.size(),
             "chat template '{}': cannot render the first {} messages of {}", name_, count, messages.size());
  OrderedJson prefix = OrderedJson::array();
  for (size_t i = 0; i < count; ++i) prefix.push_back(messages[i]);
  return render(prefix, options);
}

std::string ChatTemplate::user_prefix(const ChatOptions& options, std::optional<std::string_view> system) const {
  OrderedJson messages = OrderedJson::array();
  if (system) messages.push_back({{"role", "system"}, {"content", std::string(*system)}});
  messages.push_back({{"role", "user"}, {"content", std::string(kSentinel)}});
  std::string text = render(messages, options);
  const size_t at = text.find(kSentinel);
  DS_REQUIRE(at != std::string::npos && text.find(kSentinel, at + 1) == std::string::npos,
             "chat template '{}': it does not show the user's text exactly once, so no prefix of a user turn can be cut "
             "out of it", name_);
  text.resize(at);
  return text;
}

}  // namespace dspark::formats
