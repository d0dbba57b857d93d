#include "job/gemm_choices.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/log.h"
#include "train/checkpoint.h"

namespace dspark::job {

using model::GemmChoice;

namespace {

// The CPU's own forms and kernels, or those of another backend, which knows them when it takes them.
enum class Maker : uint8_t { cpu, other };

std::vector<GemmChoice> parse_choices(const Json& list, const std::string& where, Maker maker) {
  DS_REQUIRE(list.is_array(), "{}: 'choices' is not a list", where);
  const bool cpu = maker == Maker::cpu;
  const std::vector<std::string> there = model::cpu_kernel_names();
  std::vector<GemmChoice> choices;
  for (const Json& entry : list) {
    const auto field = [&](const char* key, bool good) { DS_REQUIRE(good, "{}: choice {}: '{}' is missing or makes no sense in {}", where, choices.size(), key, entry.dump()); };
    const auto text = [&](const char* key) { return entry.is_object() && entry.contains(key) && entry.at(key).is_string() ? entry.at(key).get<std::string>() : std::string(); };
    const auto size = [&](const char* key) { return entry.contains(key) && entry.at(key).is_number_integer() ? entry.at(key).get<int64_t>() : -1; };
    GemmChoice c;
    c.form = text("form");
    field("form", cpu ? c.form == "packed" || c.form == "tn" : !c.form.empty());
    field("type", text("type") == "bf16" || text("type") == "f32");
    c.type = text("type") == "bf16" ? DType::bf16 : DType::f32;
    const bool has_k = !cpu || c.form != "tn";
    c.n = size("n"), c.k = has_k ? size("k") : 0;
    field("n", c.n >= 1);
    field("k", !has_k || c.k >= 1);
    c.kernel = text("kernel");
    field("kernel", !c.kernel.empty());
    DS_REQUIRE(!cpu || std::find(there.begin(), there.end(), c.kernel) != there.end(), "{}: it wants the matrix kernel '{}', which this CPU does not have (it has {}); use a table that was measured here", where,
               c.kernel, fmt::join(there, ", "));
    for (const GemmChoice& other : choices) field("form", !(other.form == c.form && other.type == c.type && other.n == c.n && other.k == c.k));  // twice
    choices.push_back(std::move(c));
  }
  return choices;
}

}  // namespace

std::vector<GemmChoice> read_gemm_table(const fs::path& file) {
  const std::string where = file.string();
  const Json table = read_json(file);
  DS_REQUIRE(table.is_object() && table.value("what", Json()) == "dspark gemm table" && table.contains("choices"), "{}: not a table written by 'dspark bench gemm --save'", where);
  const Json version = table.value("format_version", Json(""));
  DS_REQUIRE(version.is_string() && version.get<std::string>().starts_with("1."), "{}: its format version {} is not one this version reads (1.x)", where, version.dump());
  return parse_choices(table.at("choices"), where, Maker::cpu);
}

OrderedJson kernels_json(const model::Backend& backend) {
  auto list = OrderedJson::array();
  for (const GemmChoice& c : backend.gemm_choices()) {
    OrderedJson j{{"form", c.form}, {"type", c.type == DType::bf16 ? "bf16" : "f32"}, {"n", c.n}};
    if (c.k > 0) j["k"] = c.k;
    j["kernel"] = c.kernel;
    list.push_back(j);
  }
  return OrderedJson{{"kernel", backend.kernel()}, {"choices", list}};
}

void choose_kernels(model::Backend& backend, model::Collectives& ranks, const std::function<void()>& rehearse) {
  if (!backend.chooses_kernels()) return;
  const double start = now_s();
  if (ranks.rank() == 0) backend.choose_kernels(rehearse);
  if (ranks.rank() == 0) log_info("matrix kernels of {} kinds of products chosen by measuring, in {}", backend.gemm_choices().size(), format_seconds(now_s() - start));
  if (ranks.size() == 1) return;
  std::string text = ranks.rank() == 0 ? kernels_json(backend).dump() : std::string();
  auto bytes = static_cast<double>(text.size());
  ranks.sum({&bytes, 1});
  std::vector<double> letters(static_cast<size_t>(bytes));  // the others bring zeros
  std::transform(text.begin(), text.end(), letters.begin(), [](char c) { return static_cast<double>(static_cast<unsigned char>(c)); });
  ranks.sum(letters);
  if (ranks.rank() == 0) return;
  for (const double c : letters) text += static_cast<char>(static_cast<unsigned char>(c));
  backend.take_choices(parse_choices(parse_json(text, "rank 0's kernels").at("choices"), "rank 0's kernels", Maker::other));
}

void adopt_kernels(CommonOptions& o, const fs::path& out) {
  const auto checkpoint = train::newest_checkpoint(out);
  if (!checkpoint) return;
  const Json state = train::read_checkpoint_state(*checkpoint);
  if (!state.contains("kernels")) return;  // an older version's
  const std::string where = (checkpoint->folder / "state.json").string();
  const Json& saved = state.at("kernels");
  DS_REQUIRE(saved.is_object() && saved.contains("kernel") && saved.at("kernel").is_string() && saved.contains("choices"), "{}: 'kernels' is {}", where, saved.dump());
  const std::string kernel = saved.at("kernel").get<std::string>();
  // The device is part of a run's bits too.
  const bool on_gpu = state.contains("backend") && state.at("backend").is_string() && state.at("backend").get<std::string>().starts_with("cuda");
  const std::string device = on_gpu ? "cuda" : "cpu";
  DS_REQUIRE(o.device == "auto" || o.device.starts_with(device), "{} was begun with --device {}, and {} gives other bits; go on with that, or choose another --out", out.string(), device, o.device);
  if (o.device == "auto") o.device = device;
  if (on_gpu) o.gemm_choices = parse_choices(saved.at("choices"), where, Maker::other);
  if (kernel.empty()) return;  // not the cpu backend's
  const std::vector<std::string> there = model::cpu_kernel_names();
  DS_REQUIRE(o.cpu_kernel == "auto" || o.cpu_kernel == kernel, "{} was begun with the matrix kernel {}, and another one gives other bits; go on with --cpu-kernel {}, or choose another --out", out.string(), kernel,
             kernel);
  DS_REQUIRE(std::find(there.begin(), there.end(), kernel) != there.end(), "{} was begun with the matrix kernel {}, which this CPU does not have (it has {}); go on where it was begun, or choose another --out",
             out.string(), kernel, fmt::join(there, ", "));
  const std::vector<GemmChoice> choices = parse_choices(saved.at("choices"), where, Maker::cpu);
  DS_REQUIRE(o.gemm_table.empty() || read_gemm_table(o.gemm_table) == choices, "{} was begun with {}, and {} holds others; leave --gemm-table out, or choose another --out", out.string(),
             choices.empty() ? "no table of kernels" : fmt::format("{} choices of kernels", choices.size()), o.gemm_table.string());
  o.cpu_kernel = kernel;
  o.gemm_table.clear();
  o.gemm_choices = choices;
}

}  // namespace dspark::job
