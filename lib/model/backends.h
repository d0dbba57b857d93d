// How backends are made. One call gives a Context with its operator table and memory behind it.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/ops.h"

namespace dspark::model {

enum class Precision : uint8_t { bf16, fp32, fp64, complex128 };

// The matrix kernel for one product instead of the usual one. cpu: "packed", with a weight as B [k, n], or "tn", the gradient of a weight
// of n columns (k is rows there: 0); cuda has more forms (cuda/blas.cc). Rows do not choose: a row's bits never depend on how many are
// multiplied with it.
struct GemmChoice {
  std::string form;
  DType type = DType::bf16;  // of the operands
  int64_t n = 0, k = 0;
  std::string kernel;
  bool operator==(const GemmChoice&) const = default;
};

struct BackendOptions {
  std::string device = "cpu";             // cpu | ref | plan, or what was registered: cuda[:N]
  Precision precision = Precision::bf16;  // cpu, cuda: bf16 or fp32; ref: fp64 or complex128; plan: the dtypes to plan for
  int threads = 0;                        // 0: all usable cores
  std::string cpu_kernel = "auto";        // matrix kernel by name
  std::vector<GemmChoice> gemm_choices;   // measured exceptions from it; cuda: what another run's gemm_choices() said
};

// Owns the backend; `context()` is valid as long as this lives.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual Context& context() = 0;
  // What was chosen, for logs and state.json: "cpu bf16, 2 threads, gemm avx512bf16".
  virtual std::string describe() const = 0;
  // The matrix kernel that was taken, and exceptions from it: part of a run's bits. Empty when the backend has none of its own.
  virtual std::string kernel() const { return {}; }
  virtual const std::vector<GemmChoice>& gemm_choices() const;
  // Whether its library has several kernels for a product, of which the fastest is found by trying: then `choose_kernels` does so for
  // every kind of product that `work` enqueues, before the first step, and later kinds take the library's first. `take_choices` has
  // those of another backend instead, before any work; it throws when they are not this device's.
  virtual bool chooses_kernels() const { return false; }
  virtual void choose_kernels(const std::function<void()>& work);
  virtual void take_choices(const std::vector<GemmChoice>& choices);
  // Columns of the widest attention head it can do.
  virtual int64_t most_head_dim() const { return std::numeric_limits<int64_t>::max(); }
};

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);
// Matrix kernels that run on this CPU, slowest first: what BackendOptions::cpu_kernel may name.
std::vector<std::string> cpu_kernel_names();
std::unique_ptr<Backend> make_ref_backend(const BackendOptions& options);

// Counts of the plan backend; what is counted and how: model/ops_plan/counts.h.
struct PlanCounts {
  double flops = 0;  // multiply and add counted as two
  double bytes_read = 0, bytes_written = 0;
  int64_t calls = 0;
  double bytes() const { return bytes_read + bytes_written; }
  void add(const PlanCounts& c) { flops += c.flops, bytes_read += c.bytes_read, bytes_written += c.bytes_written, calls += c.calls; }
};
// Kinds of work that a machine does at different speeds.
enum class Work : uint8_t {
  product,             // matrix products with a weight: forward and input gradients
  gradient_product,    // weight gradients
  attention, attention_backward,
  logits,              // the sweeps of the loss over its logits
  rows,                // norms, rope, activations, gathers: element by element over activations
  update,              // AdamW and gradient norms: element by element over parameters
  muon,
  pack,                // refresh of a backend's own copies of a weight
  upload,              // host to device, and back
};
inline constexpr int kWorks = 10;
struct PlanEntry {
  Label label;
  Work work = Work::rows;
  PlanCounts counts;
};
// A product C [m, n] = A [m, k] B [k, n], as often as it was called: "packed" (B is a weight) or "tn" (a weight's gradient).
struct PlanProduct {
  std::string form;
  int64_t m = 0, n = 0, k = 0, calls = 0;
  bool input_gradient = false;  // "packed": of W [k, n], not of its transpose
};
class PlanBackend : public Backend {
 public:
  virtual const PlanCounts& counts() const = 0;
  // The same by operator name ("linear", "vocab_loss", ..., "upload", "download"); what is not there was never called.
  virtual const std::map<std::string, PlanCounts>& by_operator() const = 0;
  // The same by what it is for, direction and kind of work, in that order.
  virtual std::vector<PlanEntry> entries() const = 0;
  virtual std::vector<PlanProduct> products() const = 0;  // by form, n, k, m
  virtual void reset_counts() = 0;
  virtual int64_t allocated_bytes() const = 0;  // through Context::allocate, now
  // What the cpu backend's own copies of the weights refreshed so far would take.
  virtual int64_t packed_bytes() const = 0;
};
std::unique_ptr<PlanBackend> make_plan_backend(const BackendOptions& options);

// Backends that this library does not know by name put themselves here before main: RegisteredBackend cuda("cuda", make). `make`
// gets options whose device is the name, or the name and ":N".
using BackendFactory = std::unique_ptr<Backend> (*)(const BackendOptions& options);
struct RegisteredBackend {
  RegisteredBackend(const std::string& name, BackendFactory make);
};
bool is_registered_backend(const std::string& device);

// By options.device.
std::unique_ptr<Backend> make_backend(const BackendOptions& options);

}  // namespace dspark::model
