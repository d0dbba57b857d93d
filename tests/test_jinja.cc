// The template engine against values of transformers' own: every text equal, every error of the same kind and message.
#include <catch2/catch.hpp>

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "core/files.h"
#include "formats/chat_template.h"

using namespace dspark;
using namespace dspark::formats;

namespace {

OrderedJson golden(const std::string& folder) {
  return OrderedJson::parse(read_text(DSPARK_SOURCE_DIR "/tests/golden/target/" + folder + "/case.json"));
}

std::tm parse_now(const std::string& text) {
  std::tm now{};
  REQUIRE(strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &now) != nullptr);
  return now;
}

// "text ..." or "error KIND: MESSAGE", so that one comparison shows all of a difference.
std::string expected_of(const OrderedJson& item) {
  if (item.contains("expected")) return "text " + item["expected"].get<std::string>();
  return "error " + item["error"]["kind"].get<std::string>() + ": " + item["error"]["message"].get<std::string>();
}

template <typename Render>
std::string outcome_of(const Render& render) {
  try {
    return "text " + render();
  } catch (const TemplateError& error) {
    return "error " + error.kind() + ": " + error.message();
  }
}

// How a single template over plain variables ends.
std::string outcome(const std::string& source, const OrderedJson& variables = OrderedJson::object(),
                    const ChatOptions& options = {}) {
  return outcome_of([&] { return ChatTemplate(source, "test").render_variables(variables, options); });
}

}  // namespace

TEST_CASE("template expressions give the reference's values and errors", "[jinja]") {
  const OrderedJson data = golden("chat_expressions");
  ChatOptions options;
  options.now = parse_now(data["now"]);
  for (const auto& item : data["cases"]) {
    const std::string source = item["template"];
    std::string expected = expected_of(item);
    // The number is a line of the Python code that Jinja generated; nothing in the template has it.
    const std::string generated = " (<template>, line ";
    if (const size_t at = expected.find(generated); at != std::string::npos) expected.resize(at);
    INFO(source);
    CHECK(outcome(source, data["context"], options) == expected);
  }
}

TEST_CASE("chat templates render the reference's conversations", "[jinja]") {
  const OrderedJson data = golden("chat_templates");
  for (const auto& item : data["cases"]) {
    std::string source;
    for (const auto& line : data["templates"][item["template"].get<std::string>()])
      source += (source.empty() ? "" : "\n") + line.get<std::string>();
    ChatOptions options;
    options.now = parse_now(data["now"]);
    OrderedJson variables = item["kwargs"];
    options.add_generation_prompt = variables.value("add_generation_prompt", false);
    options.continue_final_message = variables.value("continue_final_message", false);
    variables.erase("add_generation_prompt");
    variables.erase("continue_final_message");
    options.variables = &variables;
    if (item["tools"].get<bool>()) options.tools = &data["tools"];
    const OrderedJson& messages = data["conversations"][item["messages"].get<std::string>()];
    INFO(item["template"] << " over " << item["messages"] << " with " << item["kwargs"]);
    CHECK(outcome_of([&] { return ChatTemplate(source, "test").render(messages, options); }) == expected_of(item));
  }
}
