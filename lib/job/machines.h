// What a machine can do, for predicting how long a step takes on it: named accelerators from their public data sheets, a file, or
// (job/bench_machine.h) this machine as measured. One machine is what one rank has: a GPU with its share of the host and network.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "model/backends.h"

namespace dspark::job {

// What is expected of one kind of work; 0: that side does not limit it.
struct Rate {
  double flops = 0, bytes = 0;  // a second
};

struct Machine {
  std::string name;
  std::string peaks;        // in words: what the data sheet says, or what was measured
  std::string assumptions;  // which share of the peaks is expected, and why
  bool measured = false;
  bool packs = false;       // keeps its own copies of weights (the cpu backend)
  double memory_bytes = 0;
  double peak_flops = 0, peak_bytes = 0;  // a second, of the data sheet: matrix products of the precision, and memory; 0: not known
  std::array<Rate, model::kWorks> rate{};
  // Between ranks, each way: the first `link_ranks` ranks share the fast link, others the network. 0: not known.
  int64_t link_ranks = 1;
  double link_bytes = 0, network_bytes = 0;  // a second

  Rate& of(model::Work w) { return rate[static_cast<size_t>(w)]; }
  const Rate& of(model::Work w) const { return rate[static_cast<size_t>(w)]; }
};

// h200, b200, gb300, or a file of peak rates, JSON or `key = value` lines:
//   bf16_tflops, memory_gb, memory_gb_per_s                                  needed
//   fp32_tflops, host_gb_per_s, link_gb_per_s, link_ranks, network_gb_per_s  else: a fifteenth of bf16, and unknown
//   product_efficiency, attention_efficiency, vector_efficiency, memory_efficiency, network_efficiency   else: the named machines'
// Unknown keys and numbers that make no sense are errors.
Machine find_machine(const std::string& name_or_file, model::Precision precision);
// The named one that a device says it is ("cuda:0 bf16, NVIDIA H200, sm_90, 139.8 GiB"); none for a part of one, or a smaller one of the family.
std::optional<Machine> machine_of_device(const std::string& described, model::Precision precision);
std::string machine_names();

}  // namespace dspark::job
