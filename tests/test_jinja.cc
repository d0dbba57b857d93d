// The template engine against values of transformers' own: every text equal, every error of the same kind and message.
#include <catch2/catch.hpp>

#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
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

TEST_CASE("template errors name the template and the line", "[jinja]") {
  const auto message_of = [](const std::string& source) -> std::string {
    try {
      ChatTemplate(source, "model.gguf").render_variables(OrderedJson::object());
    } catch (const TemplateError& error) {
      return error.what();
    }
    return "no error";
  };
  CHECK(message_of("a\n{{ 1 }}\n{{ x.y }}") == "chat template 'model.gguf', line 3: 'x' is undefined");
  CHECK(message_of("{{ [1,\n 2,\n 'a' + 1] }}") ==
        "chat template 'model.gguf', line 3: can only concatenate str (not \"int\") to str");
  CHECK(message_of("\n{% include 'x' %}") ==
        "chat template 'model.gguf', line 2: the tag '{% include %}' is not supported by this template engine");
  CHECK(message_of("\n\n{{ 'a' | pprint }}") ==
        "chat template 'model.gguf', line 3: the filter 'pprint' is not supported by this template engine");
  CHECK(message_of("{{ 'a'.translate({}) }}") ==
        "chat template 'model.gguf', line 1: the method 'translate' of 'str' is not supported by this template engine");
  CHECK(message_of("{{ namespace() }}") ==
        "chat template 'model.gguf', line 1: printing a 'Namespace' object is not supported by this template engine");
  CHECK(message_of("{{ raise_exception('No system role') }}") ==
        "chat template 'model.gguf', line 1: the template refuses this conversation: No system role");
}

TEST_CASE("what the reference left open stays an error, not text", "[jinja]") {
  // Lazy and exotic corners that the engine could get subtly wrong; each is checked to be exact or refused.
  CHECK(outcome("{% for i in [1] %}{% continue %}{% else %}e{% endfor %}") == "text e");
  CHECK(outcome("{% set ns = namespace(on=true) %}{% for i in [1, 2, 3] if ns.on %}{{ i }}{% set ns.on = false %}{% "
                "endfor %}") == "text 1");
  CHECK(outcome("{% set g = [1, 2, 3] | map('string') %}{{ g | first }}{{ g | list }}{{ g | list }}") ==
        "text 1['2', '3'][]");
  CHECK(outcome("{{ '<' | e + '<' }}{{ '<' ~ ('<' | e) }}") == "text &lt;&lt;<&lt;");
  CHECK(outcome("{% call f() %}x{% endcall %}", OrderedJson{{"f", 1}}) ==
        "error TypeError: 'int' object is not callable");
  CHECK(outcome("{{ 2 ** 200 }}") == "error unsupported: an integer beyond 128 bits");
  CHECK(outcome("{{ 170141183460469231731687303715884105727 + 1 }}") ==
        "error unsupported: an integer beyond 128 bits");
  CHECK(outcome("{{ 'Σ' | lower }}") == "error unsupported: changing the case of U+03A3");
  CHECK(outcome("{{ '\\ud800' }}") == "error unsupported: a lone surrogate in a string");
  CHECK(outcome("{{ x }}\xff") == "error syntax: the template is not valid UTF-8");
  CHECK(outcome("{{ x }}", OrderedJson{{"x", "\xff"}}) ==
        "error ValueError: a string of the conversation is not valid UTF-8");
}

TEST_CASE("malformed templates are errors", "[jinja]") {
  for (const char* source : {"{{",
                             "{%",
                             "{#",
                             "{{ x",
                             "{% if",
                             "{% if x",
                             "{% if x %}",
                             "{% for i in x %}",
                             "{% raw %}",
                             "{% raw",
                             "{% macro m( %}",
                             "{% macro m() %}",
                             "{% set x %}",
                             "{% set x = %}",
                             "{% set = 1 %}",
                             "{{ x. }}",
                             "{{ x[ }}",
                             "{{ x | }}",
                             "{{ x is }}",
                             "{{ (1, }}",
                             "{{ 'a }}",
                             "{{ \"\\",
                             "{{ {1 2} }}",
                             "{{ {1: } }}",
                             "{{ [1 2] }}",
                             "{{ f(1 2) }}",
                             "{{ f(a=1, 2) }}",
                             "{{ f(**a, b) }}",
                             "{{ 1 if }}",
                             "{{ not }}",
                             "{{ 1 + }}",
                             "{{ ! }}",
                             "{{ $ }}",
                             "{{ 1 = 2 }}",
                             "{% else %}",
                             "{% endfor %}",
                             "{% elif x %}",
                             "{% %}",
                             "{% 1 %}",
                             "{% if x %}{% endfor %}",
                             "{% for i in x %}{% endif %}",
                             "{% call f %}{% endcall %}",
                             "{% generation %}",
                             "{{ 0x }}",
                             "{{ '\\x1' }}",
                             "{{ '\\u12' }}",
                             "{{ '\\N{BULLET}' }}",
                             "{% set loop.x %}",
                             "{% for loop in x %}{% endfor %}"}) {
    INFO(source);
    CHECK_THROWS_AS(ChatTemplate(source, "test"), TemplateError);
  }
}

TEST_CASE("templates cannot run away", "[jinja]") {
  const auto repeat = [](const std::string& text, size_t times) {
    std::string out;
    for (size_t i = 0; i < times; ++i) out += text;
    return out;
  };
  ChatOptions options;
  options.limits = {.max_steps = 500'000, .max_bytes = 16 << 20};  // the mechanism is the same, the test is faster
  const auto is_limit = [&](const std::string& source) {
    INFO(source.substr(0, 80));
    CHECK_THAT(outcome(source, OrderedJson::object(), options), Catch::StartsWith("error limit:"));
  };
  SECTION("deep sources") {
    const size_t n = 100000;
    is_limit("{{ " + repeat("(", n) + "1" + repeat(")", n) + " }}");
    is_limit("{{ " + repeat("[", n) + repeat("]", n) + " }}");
    is_limit("{{ " + repeat("not ", n) + "1 }}");
    is_limit("{{ " + repeat("-", n) + "1 }}");
    is_limit("{{ 1" + repeat(" + 1", n) + " }}");
    is_limit("{{ x" + repeat(".x", n) + " }}");
    is_limit("{{ 'x'" + repeat(" | trim", n) + " }}");
    is_limit("{{ 1" + repeat(" if 1 else 1", n) + " }}");
    is_limit(repeat("{% if 1 %}", n) + repeat("{% endif %}", n));
    is_limit(repeat("{% for i in [1] %}", n) + repeat("{% endfor %}", n));
    is_limit(repeat("{% macro m() %}", n) + repeat("{% endmacro %}", n));
    CHECK(outcome("{% if 0 %}" + repeat("{% elif 0 %}", n) + "{% else %}x{% endif %}") == "text x");
    CHECK(outcome("{{ 'a'" + repeat(" 'a'", n) + " }}").size() == n + 6);
  }
  SECTION("deep values") {
    is_limit("{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}");
    is_limit("{% set ns = namespace(x={}) %}{% for i in range(9999) %}{% set ns.x = {'a': ns.x} %}{% endfor %}");
    is_limit("{% set ns = namespace(x='') %}{% for i in range(9999) %}{% set ns.x = [ns.x].index %}{% endfor %}");
    is_limit("{{ 'a' | map(" + repeat("'map', ", 5000) + "'list') | list }}");
    OrderedJson deep = 1;
    for (int i = 0; i < 1000; ++i) deep = OrderedJson::array({deep});
    CHECK(outcome("{{ x }}", OrderedJson{{"x", deep}}) == "error limit: a value nests too deeply");
    // Shared parts make a value that is small in memory and huge to walk.
    const std::string dag =
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% set ns.y = [ns.y, ns.y] %}{% endfor %}";
    is_limit(dag + "{{ ns.x == ns.y }}");
    is_limit(dag + "{{ ns.x }}");
    is_limit(dag + "{{ ns.x | tojson }}");
  }
  SECTION("long runs") {
    is_limit("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}");
    is_limit("{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}");
    is_limit("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
    CHECK_THAT(outcome("{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"),
               Catch::StartsWith("error limit:"));  // with the default limits
    is_limit("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}");
    is_limit("{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% set t = s[::-1] %}{% endfor %}");
    is_limit("{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% if 'b' in s %}{% endif %}{% endfor %}");
    is_limit(
        "{% for i in range(99999) %}{{ messages | sort | length }}{% set x = range(99999) | sort(reverse=true) %}{% "
        "endfor %}");
  }
  SECTION("much memory") {
    is_limit("{{ 'a' * 10 ** 12 }}");
    is_limit("{{ [1] * 10 ** 12 }}");
    is_limit("{{ 'a' | center(10 ** 12) }}");
    is_limit("{{ [1] | batch(10 ** 12, 1) | list }}");
    is_limit("{{ [1] | slice(10 ** 12) | list }}");
    is_limit("{{ [1] | tojson(indent=10 ** 12) }}");
    is_limit("{{ 'a\nb' | indent(10 ** 12) }}");
    is_limit("{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}");
    is_limit(
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}");
    is_limit("{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}");
    CHECK_THAT(outcome("{{ range(10 ** 9) | list }}"), Catch::StartsWith("error OverflowError: Range too big."));
    CHECK_THAT(outcome("{{ '%999999999d' % 1 }}"), Catch::StartsWith("error unsupported:"));
    CHECK_THAT(outcome("{{ '{:999999999}'.format(1) }}"), Catch::StartsWith("error unsupported:"));
    CHECK_THAT(outcome("{{ strftime_now('%999999999d') }}"), Catch::StartsWith("error unsupported:"));
  }
  SECTION("cycles are freed") {  // seen by the leak checker of the sanitizer build
    CHECK(outcome("{% set ns = namespace() %}{% set ns.me = ns %}{% set ns.l = [ns] %}{{ ns.l | length }}") ==
          "text 1");
    CHECK(outcome("{% set ns = namespace() %}{% macro m() %}{% set ns.m = m %}{% endmacro %}{{ m() }}x") == "text x");
    CHECK(outcome("{% for i in [1] %}{{ loop.changed(loop) }}{% set x = loop %}{% macro m() %}{{ x }}{% endmacro %}{% "
                  "endfor %}") == "text True");
  }
}

TEST_CASE("prefixes of conversations and the prefix of a user turn", "[jinja]") {
  const OrderedJson data = golden("chat_templates");
  const auto source_of = [&](const char* name) {
    std::string source;
    for (const auto& line : data["templates"][name]) source += (source.empty() ? "" : "\n") + line.get<std::string>();
    return source;
  };
  const ChatTemplate smol(source_of("smollm2"), "smollm2");
  const std::string system =
      "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n";
  const OrderedJson messages = OrderedJson::parse(
      R"([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Bye"}])");
  CHECK(smol.render_prefix(messages, 1) == system + "<|im_start|>user\nHi<|im_end|>\n");
  CHECK(smol.render_prefix(messages, 1, {.add_generation_prompt = true}) ==
        system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  CHECK(smol.render_prefix(messages, 3) == smol.render(messages));
  CHECK(smol.render_prefix(messages, 0) == "");
  CHECK_THROWS_AS(smol.render_prefix(messages, 4), Error);

  CHECK(smol.user_prefix() == system + "<|im_start|>user\n");
  CHECK(smol.user_prefix({}, "Be brief.") == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n");
  const ChatTemplate gemma(source_of("gemma_style"), "gemma");
  CHECK(gemma.user_prefix({.bos_token = "<bos>"}) == "<bos><start_of_turn>user\n");
  CHECK_THROWS_AS(ChatTemplate("{{ messages[0].content }} {{ messages[0].content }}", "twice").user_prefix(), Error);
  CHECK_THROWS_AS(ChatTemplate("nothing", "never").user_prefix(), Error);

  CHECK_THROWS_AS(smol.render(OrderedJson::object()), Error);
  CHECK_THROWS_AS(smol.render(messages, {.add_generation_prompt = true, .continue_final_message = true}), Error);
}

TEST_CASE("damaged templates never crash or hang", "[jinja]") {
  // Real templates with pieces removed, repeated, swapped and overwritten, over real conversations: text or an error.
  const OrderedJson data = golden("chat_templates");
  std::vector<std::string> sources;
  for (const auto& [name, lines] : data["templates"].items()) {
    std::string source;
    for (const auto& line : lines) source += line.get<std::string>() + "\n";
    sources.push_back(source);
  }
  std::vector<const OrderedJson*> conversations;
  for (const auto& messages : data["conversations"]) conversations.push_back(&messages);
  const OrderedJson expressions = golden("chat_expressions");
  for (const auto& item : expressions["cases"]) sources.push_back(item["template"]);
  std::mt19937 random(20260304);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  static const std::vector<std::string> kPieces = {
      "{{", "}}",    "{%",   "%}",   "{#",       "#}", "-",    "'",      "(",    ")", "[",   "]", "|",
      ".",  " not ", " is ", "loop", "messages", "ns", "None", "endfor", "else", "0", "1e9", "~", "\n"};
  ChatOptions options;
  options.tools = &data["tools"];
  options.limits = {.max_steps = 200'000, .max_bytes = 4 << 20};
  size_t n_texts = 0, n_errors = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string source = sources[below(sources.size())];
    for (size_t change = 1 + below(3); change > 0 && !source.empty(); --change) {
      const size_t at = below(source.size()), size = std::min<size_t>(below(12), source.size() - at);
      switch (below(4)) {
        case 0:
          source.erase(at, size);
          break;
        case 1:
          source.insert(below(source.size()), source.substr(at, size));
          break;
        case 2:
          source.replace(at, size, kPieces[below(kPieces.size())]);
          break;
        default:
          source[at] = static_cast<char>(below(256));
      }
    }
    const OrderedJson& messages = *conversations[below(conversations.size())];
    const std::string result = outcome_of([&] { return ChatTemplate(source, "damaged").render(messages, options); });
    ++(result.starts_with("text") ? n_texts : n_errors);
  }
  CHECK(n_texts > 300);
  CHECK(n_errors > 300);
}
