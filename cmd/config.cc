// --config FILE: the file's options become arguments behind the command line's own.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "commands.h"
#include "core/error.h"
#include "core/files.h"
#include "core/json.h"

namespace dspark::cmd {

namespace {

struct Entry {
  std::string section, key;
  std::vector<std::string> values;
};

std::string scalar(const OrderedJson& v, const std::string& key, const fs::path& path) {
  if (v.is_string()) return v.get<std::string>();
  if (v.is_number() || v.is_boolean()) return v.dump();
  fail_usage("{}: '{}' is {}, expected a string, a number, true or false, or a list of them", path.string(), key, v.type_name());
}

void add_json(std::vector<Entry>& entries, const std::string& section, const OrderedJson& object, const fs::path& path) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object() && section.empty()) {
      add_json(entries, key, value, path);
      continue;
    }
    Entry e{section, key, {}};
    if (value.is_array())
      for (const auto& v : value) e.values.push_back(scalar(v, key, path));
    else
      e.values.push_back(scalar(value, key, path));
    entries.push_back(std::move(e));
  }
}

// The TOML reader takes a list without its end for one that ends with the line.
void require_closed(const std::string& text, const fs::path& path) {
  int open = 0, line = 1, opened_at = 0;
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') ++line, quote = 0;
    else if (quote) quote = c == quote ? 0 : quote;
    else if (c == '"' || c == '\'') quote = c;
    else if (c == '#') i = std::min(text.find('\n', i), text.size()) - 1;
    else if (c == '[') opened_at = open++ == 0 ? line : opened_at;
    else if (c == ']') --open;
    if (open < 0) fail_usage("--config {}: line {} closes a list that was not opened", path.string(), line);
  }
  if (open > 0) fail_usage("--config {}: the '[' of line {} is not closed", path.string(), opened_at);
}

std::vector<Entry> read_entries(const fs::path& path) {
  std::string text;
  try {
    text = read_text(path);
  } catch (const Error& e) {
    fail_usage("--config: {}", e.what());
  }
  std::vector<Entry> entries;
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '{') {
    const OrderedJson json = OrderedJson::parse(text, nullptr, false);
    if (json.is_discarded()) fail_usage("--config {}: not valid JSON", path.string());
    add_json(entries, "", json, path);
    return entries;
  }
  if (OrderedJson::accept(text)) fail_usage("--config {}: JSON, but not an object of options", path.string());
  require_closed(text, path);
  std::istringstream in(text);
  try {
    for (const CLI::ConfigItem& item : CLI::ConfigTOML().from_config(in)) {
      if (item.name == "++" || item.name == "--") continue;  // a section's begin and end
      entries.push_back({item.parents.empty() ? "" : item.parents.front(), item.name, item.inputs});
    }
  } catch (const CLI::Error& e) {
    fail_usage("--config {}: {}", path.string(), e.what());
  }
  return entries;
}

CLI::App* find_command(CLI::App& app, const std::string& name) {
  for (CLI::App* sub : app.get_subcommands([](CLI::App*) { return true; }))
    if (sub->get_name() == name) return sub;
  return nullptr;
}

bool on_command_line(const std::vector<std::string>& arguments, const std::string& flag) {
  for (const auto& a : arguments)
    if (a == flag || a.starts_with(flag + "=")) return true;
  return false;
}

}  // namespace

std::vector<std::string> with_config(CLI::App& app, int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  const CLI::App* sub = arguments.empty() ? nullptr : find_command(app, arguments.front());
  fs::path path;
  for (size_t i = 1; i < arguments.size(); ++i) {
    if (arguments[i] == "--config" && i + 1 < arguments.size()) path = arguments[i + 1];
    if (arguments[i].starts_with("--config=")) path = arguments[i].substr(9);
  }
  if (!sub || path.empty()) return arguments;
  std::vector<std::string> more;
  for (const Entry& e : read_entries(path)) {
    if (!e.section.empty() && e.section != sub->get_name()) {
      if (!find_command(app, e.section)) fail_usage("--config {}: section [{}] is no command of dspark", path.string(), e.section);
      continue;  // another command's
    }
    const CLI::Option* option = sub->get_option_no_throw("--" + e.key);
    if (!option || e.key == "config") fail_usage("--config {}: '{}' is no option of 'dspark {}'", path.string(), e.key, sub->get_name());
    if (on_command_line(arguments, "--" + e.key)) continue;
    if (option->get_expected_max() == 0) {  // a flag
      if (e.values.size() != 1 || (e.values.front() != "true" && e.values.front() != "false"))
        fail_usage("--config {}: '{}' is a flag: true or false", path.string(), e.key);
      if (e.values.front() == "true") more.push_back("--" + e.key);
      continue;
    }
    for (const auto& value : e.values) more.push_back("--" + e.key), more.push_back(value);
  }
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

}  // namespace dspark::cmd
