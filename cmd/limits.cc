// What every option with a number takes, in one place: an option means the same in every command. The limits are generous (a thousand
// times today's drafters) and safe: sizes that are multiplied with each other stay far inside 64 bits.
#include <charconv>
#include <cmath>

#include "commands.h"
#include "core/error.h"

namespace dspark::cmd {

namespace {

struct Limit {
  const char* name;
  double least, most;
  enum Kind { whole, real, wholes, reals } kind = whole;  // wholes, reals: lists of them, between commas
  bool is_whole() const { return kind == whole || kind == wholes; }
  bool is_list() const { return kind == wholes || kind == reals; }
};

constexpr double kMany = 1e9, kHuge = 1e18, kTokens = 1 << 24;
constexpr Limit kLimits[] = {
    // Common
    {"--threads", 0, 1024},
    {"--seed", 0, kHuge},
    // Shapes
    {"--layers", 1, 1000},
    {"--hidden", 0, 1 << 20},
    {"--block", 1, 127},  // what the decoder serves (spec/decoder.cc)
    {"--rank", 0, 65536},
    {"--draft-vocab", 0, 1 << 28},
    {"--mask-token", 0, 1 << 28},
    {"--window", 0, 1 << 30},
    // Rows and steps
    {"--steps", 1, kMany},
    {"--epochs", 0, 1e6, Limit::real},
    {"--batch-docs", 0, 1 << 20},
    {"--row-tokens", 1, kTokens},
    {"--tokens", 0, kTokens},
    {"--anchors", 1, 1 << 20},
    {"--chunk-slots", 1, 1 << 20, Limit::wholes},
    {"--store-weights", 0, 1000, Limit::reals},
    {"--validate-every", 0, kMany},
    {"--save-every", 0, kMany},
    {"--keep", 1, kMany},
    {"--seconds", 0, kMany, Limit::real},
    {"--time-limit", 0, kMany, Limit::real},
    {"--ranks", 1, 65536},
    {"--rank-timeout", 1, 1e6, Limit::real},
    {"--rows", 0, kMany},
    {"--codec-ratio", 0, 1e6, Limit::real},
    {"--price", 0, kHuge, Limit::real},
    // The objective and the optimizer: what is too large is seen in the loss
    {"--decay", 0, kHuge, Limit::real},
    {"--dpace", 0, 1, Limit::real},
    {"--tap-noise", 0, kHuge, Limit::real},
    {"--lr", 0, kHuge, Limit::real},
    {"--muon-lr", 0, kHuge, Limit::real},
    {"--warmup", 0, 1, Limit::real},
    {"--weight-decay", 0, kHuge, Limit::real},
    {"--muon-weight-decay", 0, kHuge, Limit::real},
    {"--clip", 0, kHuge, Limit::real},
    {"--val-fraction", 0, 1, Limit::real},
    // Text and tasks
    {"--max-length", 8, kTokens},
    {"--max-new-tokens", 1, kTokens},
    {"--question-tokens", 1, kTokens},
    {"--temperature", 0, 1e6, Limit::real},
    {"--top-k", 0, 1 << 28},
    {"--top-p", 1e-6, 1, Limit::real},
    {"--min-p", 0, 1, Limit::real},
    {"--batch", 1, 65536},
    {"--limit", 0, kMany},
    {"--synthesize", 0, kMany},
    {"--hold-out", 0, kMany},
    {"--preview", 1, kMany},
};

const Limit* find_limit(const CLI::Option& option) {
  for (const Limit& limit : kLimits)
    if (option.check_lname(limit.name + 2)) return &limit;
  return nullptr;
}

bool parses(const std::string& text, bool whole, double& value) {
  const char* end = text.data() + text.size();
  if (whole) {
    int64_t n = 0;
    const auto [stop, error] = std::from_chars(text.data(), end, n);
    value = static_cast<double>(n);
    return error == std::errc() && stop == end;
  }
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && std::isfinite(value);
}

void require_within(const Limit& limit, double least, const std::string& text) {
  for (const std::string& part : limit.is_list() ? job::split_list(text) : std::vector<std::string>{text}) {
    double value = 0;
    if (parses(part, limit.is_whole(), value) && value >= least && value <= limit.most) continue;
    fail_usage("{} {}: {}expected a {} from {} to {}", limit.name, text, part == text ? "" : fmt::format("'{}' is wrong, ", part), limit.is_whole() ? "whole number" : "number", least,
               limit.most);
  }
}

}  // namespace

void add_limits(CLI::App& sub) {
  for (CLI::Option* option : sub.get_options()) {
    if (option->check_lname("cpu-kernel")) option->check([](const std::string& name) {
      job::check_kernel_name(name);
      return std::string();
    });
    const Limit* limit = find_limit(*option);
    double value = 0;
    const bool number = parses(option->get_default_str(), false, value);  // its default is always one of its values
    DS_ASSERT(limit || !number, "{} has no limits", option->get_name());
    if (!limit) continue;
    const double least = number ? std::min(limit->least, value) : limit->least;
    const std::string range = limit->most < kMany ? fmt::format("{}..{}", least, limit->most) : "";  // for --help
    option->check([limit, least](const std::string& text) {
      require_within(*limit, least, text);
      return std::string();
    }, range);
  }
}

std::vector<double> numbers_of(const std::vector<std::string>& lists) {
  std::vector<double> values;
  for (const std::string& list : lists)
    for (const std::string& part : job::split_list(list)) values.push_back(std::stod(part));
  return values;
}

}  // namespace dspark::cmd
