#include "cuda/graphs.h"

namespace dspark::cuda {

Graphs::~Graphs() {
  for (const auto& [key, executable] : executables_)
    if (executable != nullptr) driver_.cuGraphExecDestroy(executable);
}

void* Graphs::capture(const std::function<void()>& work) {
  void *graph = nullptr, *executable = nullptr;
  check(driver_, driver_.cuStreamBeginCapture_v2(stream_, kCaptureThreadLocal), "begin to capture a graph");
  try {
    work();
  } catch (...) {
    if (driver_.cuStreamEndCapture(stream_, &graph) == kSuccess && graph != nullptr) driver_.cuGraphDestroy(graph);
    throw;
  }
  check(driver_, driver_.cuStreamEndCapture(stream_, &graph), "capture a graph");
  const int status = driver_.cuGraphInstantiateWithFlags(&executable, graph, 0);
  driver_.cuGraphDestroy(graph);
  check(driver_, status, "make a graph ready");
  return executable;
}

void Graphs::run(const std::vector<int64_t>& key, const std::function<void()>& work) {
  const auto [it, first] = executables_.try_emplace(key, nullptr);
  if (first) return work();
  if (it->second == nullptr) it->second = capture(work);
  check(driver_, driver_.cuGraphLaunch(it->second, stream_), "launch a graph");
}

}  // namespace dspark::cuda
