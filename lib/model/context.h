// Context: one device at work. It bundles the operator table (a backend), the device's memory and its four queues.
//
// Operators only enqueue: on `compute` (kernels), `upload` and `download` (copies; two queues, since a step's results wait for its
// end and the next step's batch must not) or `comm` (collectives). Queues are ordered inside and linked by events. On CPUs all
// queues run inline, and another thread may use comm meanwhile (that of HostCollectives does). Nothing above ops.h reads a device value except through `download`, which completes when its event has.
//
// Memory inside a step comes from the Arena: a bump allocator on one block that was sized by running the same step code
// on the `plan` backend. mark()/release() give scoped reuse:
//
//     |<- weights, states (allocate) ->|  arena: | saved activations ... | loss chunk | free |
//                                                ^mark                    ^mark        ^top
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "model/tensor.h"

namespace dspark::model {

class Ops;

enum class Queue : uint8_t { compute, upload, download, comm };
inline constexpr int kQueues = 4;

// What the work being enqueued is for: the planner books its FLOPs and bytes there, other backends ignore it. The graph says
// context, trunk and markov; attention, the loss head, the optimizer and uploads are known by their operators.
enum class Part : uint8_t { other, upload, context, trunk, attention, target_vocab, draft_vocab, markov, optimizer };
inline constexpr int kParts = 9;
struct Label {
  Part part = Part::other;
  bool backward = false;
};

struct Event {
  uint64_t id = 0;  // 0: already happened
};

// Device memory and queues; one per backend. Thread-compatible: one owner at a time.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;         // "cpu", "ref", "plan", "cuda:0"
  virtual DType act_dtype() const = 0;          // activations and weights in products: bf16, f32, f64, c128
  virtual DType acc_dtype() const = 0;          // residual stream, gradients, losses, optimizer: f32, f64, c128
  virtual Address allocate(int64_t bytes) = 0;  // 64-byte aligned, uninitialised; throws when there is not enough
  virtual void free(Address a) = 0;

  // dst and src have the same shape; dtypes may differ (converted: round to nearest even; i64 -> i32 is range-checked).
  // The host memory must stay valid until the returned event has happened.
  virtual Event upload(Queue q, const Tensor& dst, const ConstHostMatrix& src) = 0;
  virtual Event download(Queue q, const HostMatrix& dst, const Tensor& src) = 0;

  virtual Event record(Queue q) = 0;
  virtual void wait(Queue q, Event e) = 0;  // work enqueued on q after this starts after e
  virtual void synchronize(Event e) = 0;    // the host waits; when it throws, the event has happened all the same

  // Seconds that the compute queue takes for what `work` enqueues, by the device's own clock where it has one. Waits; for measurements.
  virtual double time(const std::function<void()>& work);
  virtual int64_t memory_bytes() const { return 0; }  // that the device has; 0: not known
};

class Arena {
 public:
  // capacity 0: unlimited, for planning (the device must be the plan backend).
  Arena(Device& device, int64_t capacity_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // [rows, cols], row stride = cols, 64-byte aligned; uninitialised. Throws when the plan was too small (a bug).
  Tensor matrix(DType dtype, int64_t rows, int64_t cols);
  Tensor vector(DType dtype, int64_t n) { return matrix(dtype, 1, n); }
  int64_t mark() const { return top_; }
  void release(int64_t mark) { top_ = mark; }
  int64_t peak_bytes() const { return peak_; }

 private:
  Device& device_;
  Address base_;
  int64_t capacity_, top_ = 0, peak_ = 0;
};

class Context {
 public:
  Context(Ops& ops, Device& device) : ops_(ops), device_(device) {}
  Ops& ops() { return ops_; }
  Device& device() { return device_; }
  DType act_dtype() const { return device_.act_dtype(); }
  DType acc_dtype() const { return device_.acc_dtype(); }

  // Outside steps: memory that lives as long as the context's owner keeps it. 64-byte aligned.
  Tensor allocate(DType dtype, int64_t rows, int64_t cols);
  void free(const Tensor& t) { device_.free(t.data); }
  Label label() const { return label_; }
  // Blocking conveniences for set-up, tests and decoding.
  void upload_now(const Tensor& dst, const ConstHostMatrix& src);
  void download_now(const HostMatrix& dst, const Tensor& src);

 private:
  friend class Labelled;
  Ops& ops_;
  Device& device_;
  Label label_;
};

// Labels the work of a scope.
class Labelled {
 public:
  Labelled(Context& ctx, Label label) : ctx_(ctx), before_(ctx.label_) { ctx.label_ = label; }
  ~Labelled() { ctx_.label_ = before_; }
  Labelled(const Labelled&) = delete;
  Labelled& operator=(const Labelled&) = delete;

 private:
  Context& ctx_;
  Label before_;
};

}  // namespace dspark::model
