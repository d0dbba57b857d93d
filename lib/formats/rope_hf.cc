#include <algorithm>
#include <array>

#include "formats/hf_config.h"
#include "formats/json_fields.h"

namespace dspark::formats {
namespace {

constexpr std::array<std::string_view, 6> kTypes = {"default", "linear", "yarn", "llama3", "dynamic", "proportional"};

double within(const JsonFields& f, std::string_view key, double value, double least, double most) {
  DS_REQUIRE(value >= least && value <= most, "{}: '{}' is {}, expected {} to {}", f.where(), key, value, least, most);
  return value;
}
double theta_of(const JsonFields& f, double value) { return within(f, "rope_theta", value, kLeastRopeTheta, kMostRopeTheta); }
double factor_of(const JsonFields& f, std::string_view key, double value) { return within(f, key, value, 1 / kMostRopeFactor, kMostRopeFactor); }
double partial_of(const JsonFields& f, double value) { return within(f, "partial_rotary_factor", value, 1e-6, 1); }

// One object that says it all: rope_parameters, or rope_scaling with the theta beside it.
RopeConfig parse(const JsonFields& f, double theta) {
  RopeConfig r;
  r.theta = theta_of(f, f.number("rope_theta").value_or(theta));
  r.type = f.string("rope_type").value_or(f.string("type").value_or("default"));
  DS_REQUIRE(std::find(kTypes.begin(), kTypes.end(), r.type) != kTypes.end(),
             "{}: rope type '{}' is not supported (default, linear, yarn, llama3, dynamic, proportional are)",
             f.where(), r.type);
  r.partial_rotary_factor = partial_of(f, f.number("partial_rotary_factor").value_or(1.0));
  if (r.type == "default") return r;
  const auto factor = f.number("factor");
  DS_REQUIRE(factor || r.type == "proportional", "{}: 'factor' is missing for rope type '{}'", f.where(), r.type);
  r.factor = factor_of(f, "factor", factor.value_or(1.0));
  r.original_max_position = f.integer("original_max_position_embeddings").value_or(0);
  DS_REQUIRE(r.original_max_position >= 0, "{}: 'original_max_position_embeddings' is {}", f.where(),
             r.original_max_position);
  if (r.type == "llama3") {
    r.low_freq_factor = factor_of(f, "low_freq_factor", f.required_number("low_freq_factor"));
    r.high_freq_factor = factor_of(f, "high_freq_factor", f.required_number("high_freq_factor"));
    DS_REQUIRE(r.high_freq_factor > r.low_freq_factor && r.original_max_position > 0,
               "{}: llama3 needs high_freq_factor > low_freq_factor and original_max_position_embeddings", f.where());
  }
  if (r.type == "yarn") {
    r.beta_fast = factor_of(f, "beta_fast", f.number("beta_fast").value_or(32));
    r.beta_slow = factor_of(f, "beta_slow", f.number("beta_slow").value_or(1));
    r.attention_factor = within(f, "attention_factor", f.number("attention_factor").value_or(0), 0, kMostRopeFactor);
    r.mscale = within(f, "mscale", f.number("mscale").value_or(0), 0, kMostRopeFactor);
    r.mscale_all_dim = within(f, "mscale_all_dim", f.number("mscale_all_dim").value_or(0), 0, kMostRopeFactor);
    r.truncate = f.boolean("truncate").value_or(true);
  }
  return r;
}

}  // namespace

RopeConfig rope_from_hf(const Json& config, std::string_view where) {
  const JsonFields top(config, std::string(where));
  const Json* parameters = top.find("rope_parameters");
  const Json* scaling = top.find("rope_scaling");
  const auto theta = top.number("rope_theta");
  RopeConfig r;
  if (parameters) {
    const JsonFields f(*parameters, fmt::format("{}: rope_parameters", where));
    DS_REQUIRE(!f.has("full_attention") && !f.has("sliding_attention"),
               "{}: rotary settings that differ by layer type are not supported", f.where());
    r = parse(f, theta.value_or(10000.0));
    DS_REQUIRE(!theta || *theta == r.theta, "{}: rope_theta is {} but rope_parameters says {}", where, *theta, r.theta);
    if (scaling) {
      const RopeConfig old = parse(JsonFields(*scaling, fmt::format("{}: rope_scaling", where)), r.theta);
      DS_REQUIRE(old.type == r.type && old.factor == r.factor,
                 "{}: rope_scaling ({}, factor {}) and rope_parameters ({}, factor {}) differ", where, old.type,
                 old.factor, r.type, r.factor);
    }
  } else if (scaling) {
    r = parse(JsonFields(*scaling, fmt::format("{}: rope_scaling", where)), theta.value_or(10000.0));
  } else {
    r.theta = theta_of(top, theta.value_or(10000.0));
  }
  // Some configs keep this one outside.
  if (const auto partial = top.number("partial_rotary_factor"); partial && r.partial_rotary_factor == 1.0)
    r.partial_rotary_factor = partial_of(top, *partial);
  return r;
}

OrderedJson rope_to_hf(const RopeConfig& r) {
  OrderedJson j = {{"rope_theta", r.theta}, {"rope_type", r.type}};
  if (r.partial_rotary_factor != 1.0) j["partial_rotary_factor"] = r.partial_rotary_factor;
  if (r.type == "default") return j;
  j["factor"] = r.factor;
  if (r.original_max_position > 0) j["original_max_position_embeddings"] = r.original_max_position;
  if (r.type == "llama3") {
    j["low_freq_factor"] = r.low_freq_factor;
    j["high_freq_factor"] = r.high_freq_factor;
  }
  if (r.type == "yarn") {
    j["beta_fast"] = r.beta_fast;
    j["beta_slow"] = r.beta_slow;
    if (r.attention_factor != 0) j["attention_factor"] = r.attention_factor;
    if (r.mscale != 0) j["mscale"] = r.mscale;
    if (r.mscale_all_dim != 0) j["mscale_all_dim"] = r.mscale_all_dim;
    j["truncate"] = r.truncate;
  }
  return j;
}

}  // namespace dspark::formats
