#include "job/machines.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"

namespace dspark::job {

using model::Precision;
using model::Work;

namespace {

// Peak rates as data sheets give them, decimal units; and the shares of them that are expected.
struct Peaks {
  std::string name;
  double bf16_tflops = 0;      // dense tensor rate
  double fp32_tflops = 0;      // vector units
  double memory_gb = 0, memory_gb_per_s = 0;
  double host_gb_per_s = 0;    // host to device, one way
  double link_gb_per_s = 0;    // between GPUs of one domain, one way
  double link_ranks = 1;
  double network_gb_per_s = 0;  // to other domains, a rank, one way
  // Large bf16 products of vendor libraries reach 65 to 80 % of the dense data-sheet rate on these parts, whose clocks fall under full
  // load; a training step's are not all large.
  double product_efficiency = 0.65;
  // FlashAttention-3 reports up to 75 % of an H100's rate forward and 60 % backward at its best shapes; blocks of eight queries over
  // a masked context fill the tensor tiles less.
  double attention_efficiency = 0.25;
  double vector_efficiency = 0.5;   // of the fp32 rate, for exp and friends in the loss's sweeps
  double memory_efficiency = 0.85;  // streaming kernels against the data sheet
  double network_efficiency = 0.8;  // ring collectives against the link's rate
};

// NVIDIA's data sheets, dense (half of what is printed "with sparsity"):
//   H200 SXM: H200 Tensor Core GPU data sheet: BF16 1979 TFLOPS with sparsity, FP32 67, 141 GB HBM3e at 4.8 TB/s, NVLink 900 GB/s both
//     ways together, PCIe Gen5 128 GB/s both ways; HGX boards of 8 GPUs, one 400 Gb/s ConnectX-7 a GPU.
//   B200: DGX B200 data sheet, a GPU's share of 8: BF16 36 PFLOPS with sparsity -> 2.25 dense each, 1,440 GB HBM3e at 64 TB/s, NVLink
//     14.4 TB/s; FP32 75 TFLOPS (HGX B200: 600 for 8); PCIe Gen5, ConnectX-7 of 400 Gb/s a GPU.
//   GB300: GB300 NVL72 data sheet, a GPU's share of 72: BF16 360 PFLOPS with sparsity -> 2.5 dense each, 20 TB HBM3e at 576 TB/s, NVLink
//     130 TB/s, FP32 6 PFLOPS; NVLink-C2C 900 GB/s both ways between one Grace and two GPUs; one 800 Gb/s ConnectX-8 a GPU.
const Peaks kNamed[] = {
    {"h200", 989.5, 67, 141, 4800, 64, 450, 8, 50},
    {"b200", 2250, 75, 180, 8000, 64, 900, 8, 50},
    {"gb300", 2500, 83, 278, 8000, 225, 900, 72, 100},
};

// `key = value` lines with # comments, enough of TOML for a table of numbers; or JSON.
Json read_pairs(const fs::path& file) {
  const std::string text = read_text(file);
  if (text.find_first_not_of(" \t\r\n") != std::string::npos && text[text.find_first_not_of(" \t\r\n")] == '{')
    return parse_json(text, file.string());
  Json pairs = Json::object();
  std::istringstream in(text);
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    line = line.substr(0, line.find('#'));
    const auto trim = [](std::string s) {
      const size_t begin = s.find_first_not_of(" \t\r"), end = s.find_last_not_of(" \t\r");
      return begin == std::string::npos ? std::string() : s.substr(begin, end - begin + 1);
    };
    if (trim(line).empty()) continue;
    const size_t equals = line.find('=');
    DS_REQUIRE(equals != std::string::npos, "{}:{}: '{}' is not 'key = number'", file.string(), number, trim(line));
    const std::string key = trim(line.substr(0, equals)), value = trim(line.substr(equals + 1));
    if (value.size() >= 2 && value.front() == '"' && value.back() == '"') {
      pairs[key] = value.substr(1, value.size() - 2);
      continue;
    }
    char* end = nullptr;
    const double v = std::strtod(value.c_str(), &end);
    DS_REQUIRE(!value.empty() && *end == 0, "{}:{}: '{}' is not a number", file.string(), number, value);
    pairs[key] = v;
  }
  return pairs;
}

Peaks read_peaks(const fs::path& file) {
  Peaks p;
  p.name = file.stem().string();
  const std::map<std::string, double*> fields = {{"bf16_tflops", &p.bf16_tflops}, {"fp32_tflops", &p.fp32_tflops}, {"memory_gb", &p.memory_gb},
                                                 {"memory_gb_per_s", &p.memory_gb_per_s}, {"host_gb_per_s", &p.host_gb_per_s}, {"link_gb_per_s", &p.link_gb_per_s},
                                                 {"link_ranks", &p.link_ranks}, {"network_gb_per_s", &p.network_gb_per_s}, {"product_efficiency", &p.product_efficiency},
                                                 {"attention_efficiency", &p.attention_efficiency}, {"vector_efficiency", &p.vector_efficiency},
                                                 {"memory_efficiency", &p.memory_efficiency}, {"network_efficiency", &p.network_efficiency}};
  const Json pairs = read_pairs(file);
  DS_REQUIRE(pairs.is_object(), "{}: not an object of machine rates", file.string());
  for (const auto& [key, value] : pairs.items()) {
    if (key == "name" && value.is_string()) {
      p.name = value.get<std::string>();
      continue;
    }
    const auto it = fields.find(key);
    std::string known = "name";
    for (const auto& [field, place] : fields) known += ", " + field;
    DS_REQUIRE(it != fields.end(), "{}: '{}' is not a rate of a machine; there are {}", file.string(), key, known);
    DS_REQUIRE(value.is_number() && value.get<double>() > 0 && std::isfinite(value.get<double>()), "{}: {} is {}, expected a number above 0", file.string(), key, value.dump());
    *it->second = value.get<double>();
    DS_REQUIRE(!key.ends_with("efficiency") || *it->second <= 1, "{}: {} is {}, expected a share of at most 1", file.string(), key, *it->second);
  }
  for (const char* key : {"bf16_tflops", "memory_gb", "memory_gb_per_s"})
    DS_REQUIRE(pairs.contains(key), "{}: '{}' is missing; a machine needs bf16_tflops, memory_gb and memory_gb_per_s", file.string(), key);
  DS_REQUIRE(p.link_ranks == std::floor(p.link_ranks), "{}: link_ranks is {}, expected a whole number", file.string(), p.link_ranks);
  if (p.fp32_tflops == 0) p.fp32_tflops = p.bf16_tflops / 15;
  return p;
}

Machine machine_of(const Peaks& p, Precision precision) {
  Machine m;
  m.name = p.name;
  const bool half = precision == Precision::bf16;
  const double peak = 1e12 * (half ? p.bf16_tflops : p.fp32_tflops);
  const double product = peak * p.product_efficiency, vector = 1e12 * p.fp32_tflops * p.vector_efficiency, memory = 1e9 * p.memory_gb_per_s * p.memory_efficiency;
  for (Rate& r : m.rate) r = {vector, memory};
  for (Work w : {Work::product, Work::gradient_product, Work::muon}) m.of(w) = {product, memory};
  for (Work w : {Work::attention, Work::attention_backward}) m.of(w) = {peak * p.attention_efficiency, memory};
  m.of(Work::upload) = {0, p.host_gb_per_s > 0 ? 1e9 * p.host_gb_per_s * p.memory_efficiency : memory};
  m.memory_bytes = 1e9 * p.memory_gb;
  m.peak_flops = peak, m.peak_bytes = 1e9 * p.memory_gb_per_s;
  m.link_ranks = static_cast<int64_t>(p.link_ranks);
  m.link_bytes = 1e9 * p.link_gb_per_s * p.network_efficiency;
  m.network_bytes = 1e9 * p.network_gb_per_s * p.network_efficiency;
  m.peaks = fmt::format("{} {:g} TFLOP/s, fp32 vectors {:g} TFLOP/s, {:g} GB at {:g} GB/s, host {:g} GB/s, link of {} {:g} GB/s, network {:g} GB/s",
                        half ? "bf16 dense" : "fp32", half ? p.bf16_tflops : p.fp32_tflops, p.fp32_tflops, p.memory_gb, p.memory_gb_per_s, p.host_gb_per_s, m.link_ranks,
                        p.link_gb_per_s, p.network_gb_per_s);
  m.assumptions = fmt::format("of these: products {:g}, attention {:g}, vectors {:g}, memory {:g}, links {:g} (what good kernels of libraries reach; nothing was measured)",
                              p.product_efficiency, p.attention_efficiency, p.vector_efficiency, p.memory_efficiency, p.network_efficiency);
  return m;
}

}  // namespace

std::string machine_names() {
  std::string names = "this";
  for (const Peaks& p : kNamed) names += ", " + p.name;
  return names;
}

Machine find_machine(const std::string& name, Precision precision) {
  for (const Peaks& p : kNamed)
    if (p.name == name) return machine_of(p, precision);
  std::error_code ec;
  if (!fs::exists(name, ec)) fail_usage("--machine {}: neither a file nor one of {}", name, machine_names());
  return machine_of(read_peaks(name), precision);
}

std::optional<Machine> machine_of_device(const std::string& described, Precision precision) {
  for (const Peaks& p : kNamed) {
    std::string name = p.name;
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    if (described.find(", NVIDIA " + name + ",") != std::string::npos) return machine_of(p, precision);
  }
  return std::nullopt;
}

}  // namespace dspark::job
