// --help: the option, what it takes, and its text with its default, wrapped.
#include <sstream>

#include "commands.h"

namespace dspark::cmd {

namespace {

constexpr size_t kName = 30, kWidth = 118;

// CLI11's type carries the checks behind a colon; its own names for plain types say nothing.
std::string value_name(const CLI::Option& option) {
  std::string type = option.get_type_name();
  type = type.substr(0, type.find(':'));
  if (type == "INT" || type == "UINT") return "N";
  if (type == "FLOAT") return "X";
  return type == "TEXT" ? "WORD" : type;
}

std::string wrapped(const std::string& text) {
  std::istringstream words(text);
  std::string out, line;
  for (std::string word; words >> word;) {
    if (!line.empty() && kName + line.size() + 1 + word.size() > kWidth) {
      out += line + "\n" + std::string(kName, ' ');
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return out + line;
}

class Help : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool positional) const override {
    std::string name = "  " + (positional ? option->get_name(true, false) : option->get_name(false, true));
    if (const size_t brace = name.find('{'); brace != std::string::npos) name.resize(brace);  // what a flag sets
    if (!positional && option->get_type_size() != 0) name += " " + value_name(*option);
    if (option->get_expected_max() == CLI::detail::expected_max_vector_size && !name.ends_with("...")) name += " ...";
    name += name.size() + 2 > kName ? "\n" + std::string(kName, ' ') : std::string(kName - name.size(), ' ');
    std::string text = option->get_description();
    // 0 and -1 stand for what the text says they do.
    const std::string value = option->get_default_str();
    if (!value.empty() && !(text.find("(" + value + ":") != std::string::npos)) text += " [" + value + "]";
    return name + wrapped(text) + "\n";
  }
  std::string make_group(std::string group, bool positional, std::vector<const CLI::Option*> options) const override {
    std::string out = "\n" + group + ":\n";
    for (const CLI::Option* option : options) out += make_option(option, positional);
    return out;
  }
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, name, mode);
    for (size_t at; (at = text.find("\n\n\n")) != std::string::npos;) text.erase(at, 1);
    while (text.ends_with("\n\n")) text.pop_back();
    return text;
  }
};

}  // namespace

void use_help(CLI::App& app) {
  const auto help = std::make_shared<Help>();
  help->column_width(kName);
  help->label("SUBCOMMAND", "COMMAND");
  app.formatter(help);
  app.set_help_flag("-h,--help", "this help");
}

}  // namespace dspark::cmd
