#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace dspark::model {
namespace {

using formats::RopeConfig;

// YaRN (Peng et al. 2023, section 3): low frequencies are interpolated by `factor`, high ones kept, a linear ramp between.
void yarn(const RopeConfig& c, int64_t rot, int64_t max_position, RopeTable& table) {
  const double original = static_cast<double>(c.original_max_position > 0 ? c.original_max_position : max_position);
  auto correction_dim = [&](double rotations) {
    return static_cast<double>(rot) * std::log(original / (rotations * 2 * std::numbers::pi)) / (2 * std::log(c.theta));
  };
  double low = correction_dim(c.beta_fast), high = correction_dim(c.beta_slow);
  if (c.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(rot - 1));
  if (low == high) high += 0.001;  // the references' guard against an empty ramp
  for (size_t i = 0; i < table.inv_freq.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    table.inv_freq[i] = table.inv_freq[i] / c.factor * ramp + table.inv_freq[i] * (1 - ramp);
  }
  auto mscale = [&](double m) { return c.factor <= 1 ? 1.0 : 0.1 * m * std::log(c.factor) + 1.0; };
  if (c.attention_factor != 0) table.scale = c.attention_factor;
  else if (c.mscale != 0 && c.mscale_all_dim != 0) table.scale = mscale(c.mscale) / mscale(c.mscale_all_dim);
  else table.scale = mscale(1.0);
}

// Llama 3.1's smoothing by wavelength.
void llama3(const RopeConfig& c, int64_t max_position, RopeTable& table) {
  const double original = static_cast<double>(c.original_max_position > 0 ? c.original_max_position : max_position);
  const double low_wavelength = original / c.low_freq_factor, high_wavelength = original / c.high_freq_factor;
  for (double& f : table.inv_freq) {
    const double wavelength = 2 * std::numbers::pi / f;
    if (wavelength > low_wavelength) f /= c.factor;
    else if (wavelength >= high_wavelength) {
      const double smooth = (original / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor);
      f = (1 - smooth) * f / c.factor + smooth * f;
    }
  }
}

}  // namespace

RopeTable make_rope_table(const RopeConfig& c, int64_t head_dim, int64_t max_position, int64_t row_length) {
  DS_REQUIRE(c.theta > 0 && c.factor > 0, "rope: theta {} and factor {} must be positive", c.theta, c.factor);
  RopeTable table;
  const bool proportional = c.type == "proportional";
  table.rot = proportional ? head_dim : static_cast<int64_t>(static_cast<double>(head_dim) * c.partial_rotary_factor);
  DS_REQUIRE(table.rot > 0 && table.rot % 2 == 0, "rope: {} of {} channels cannot be rotated in pairs", table.rot, head_dim);
  double theta = c.theta;
  if (c.type == "dynamic" && row_length > max_position) {
    const double r = static_cast<double>(table.rot), len = static_cast<double>(row_length), max = static_cast<double>(max_position);
    theta *= std::pow(c.factor * len / max - (c.factor - 1), r / (r - 2));
  }
  const int64_t half = table.rot / 2;
  // `proportional`: full-width halves, frequencies above the rotated fraction are zero, exponents over HD.
  const auto live = proportional ? static_cast<int64_t>(c.partial_rotary_factor * static_cast<double>(head_dim) / 2) : half;
  for (int64_t i = 0; i < half; ++i)
    table.inv_freq.push_back(i < live ? std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(table.rot)) : 0.0);
  if (c.type == "linear" || (proportional && c.factor != 1.0))
    for (double& f : table.inv_freq) f /= c.factor;
  else if (c.type == "yarn") yarn(c, table.rot, max_position, table);
  else if (c.type == "llama3") llama3(c, max_position, table);
  else
    DS_REQUIRE(c.type == "default" || c.type == "dynamic" || proportional,
               "rope type '{}' is not supported (default, linear, yarn, llama3, dynamic, proportional are)", c.type);
  return table;
}

RopeConfig trained_rope(const RopeConfig& wanted, formats::Rotary rotary) {
  if (rotary != formats::Rotary::reference || !wanted.rotates_part()) return wanted;
  DS_REQUIRE(wanted.type == "default",
             "rope type '{}' with partial_rotary_factor {}: the reference trainers cannot train this (their frequencies cover a part of the "
             "head, their rotation all of it); use --rotary served, which rotates the part as servers do",
             wanted.type, wanted.partial_rotary_factor);
  RopeConfig full = wanted;
  full.partial_rotary_factor = 1;
  return full;
}

std::optional<RopeConfig> rope_from_divisors(const RopeConfig& config, const std::vector<double>& divisors, int64_t head_dim,
                                             int64_t max_position) {
  const RopeTable plain = make_rope_table(config, head_dim, max_position);
  if (config.type != "default" || divisors.size() != plain.inv_freq.size()) return std::nullopt;
  const double factor = *std::max_element(divisors.begin(), divisors.end());
  if (factor == 1 && *std::min_element(divisors.begin(), divisors.end()) == 1) return config;
  constexpr double kRounding = 1e-6;  // the file's divisors are fp32
  const auto gives = [&](const RopeConfig& c) {
    const RopeTable table = make_rope_table(c, head_dim, max_position);
    for (size_t i = 0; i < divisors.size(); ++i)
      if (std::abs(table.inv_freq[i] * divisors[i] / plain.inv_freq[i] - 1) > kRounding) return false;
    return true;
  };
  RopeConfig c = config;
  c.type = "llama3", c.factor = factor;
  // What Llama 3.x says, or lengths a converter may have known.
  for (const int64_t original : {int64_t{8192}, static_cast<int64_t>(std::llround(static_cast<double>(max_position) / factor)), max_position}) {
    c.original_max_position = original;
    if (original > 0 && gives(c)) return c;
  }
  // On the ramp 1/divisor = (1 - s)/factor + s with s = (original / wavelength - low)/(high - low), a line in 1/wavelength. It knows
  // original : low : high only, so low is 1.
  double n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (size_t i = 0; i < divisors.size(); ++i) {
    const double s = (1 / divisors[i] - 1 / factor) / (1 - 1 / factor), x = plain.inv_freq[i] / (2 * std::numbers::pi);
    if (s <= 1e-4 || s >= 1 - 1e-4) continue;
    n += 1, sx += x, sy += s, sxx += x * x, sxy += x * s;
  }
  if (n < 2) return std::nullopt;
  const double slope = (n * sxy - sx * sy) / (n * sxx - sx * sx), at_zero = (sy - slope * sx) / n;
  if (!(slope > 0) || !(at_zero < 0)) return std::nullopt;
  c.high_freq_factor = std::round((1 - 1 / at_zero) * 1e3) / 1e3;
  c.original_max_position = std::llround(slope * (c.high_freq_factor - 1));
  if (c.original_max_position < 1 || c.high_freq_factor <= 1 || !gives(c)) return std::nullopt;
  return c;
}

}  // namespace dspark::model
