#include "model/backends.h"

namespace dspark::model {

std::unique_ptr<Backend> make_backend(const BackendOptions& options) {
  if (options.device == "cpu") return make_cpu_backend(options);
  if (options.device == "ref") return make_ref_backend(options);
  if (options.device == "plan") return make_plan_backend(options);
  fail_usage("there is no device '{}': expected cpu, ref or plan", options.device);
}

}  // namespace dspark::model
