#include "model/backends.h"

namespace dspark::model {

const std::vector<GemmChoice>& Backend::gemm_choices() const {
  static const std::vector<GemmChoice> none;
  return none;
}
void Backend::choose_kernels(const std::function<void()>&) {}
void Backend::take_choices(const std::vector<GemmChoice>&) {}

namespace {

std::map<std::string, BackendFactory>& registered() {
  static std::map<std::string, BackendFactory> all;
  return all;
}

std::string name_of(const std::string& device) { return device.substr(0, device.find(':')); }

}  // namespace

RegisteredBackend::RegisteredBackend(const std::string& name, BackendFactory make) { registered()[name] = make; }

bool is_registered_backend(const std::string& device) { return registered().count(name_of(device)) > 0; }

std::unique_ptr<Backend> make_backend(const BackendOptions& options) {
  if (options.device == "cpu") return make_cpu_backend(options);
  if (options.device == "ref") return make_ref_backend(options);
  if (options.device == "plan") return make_plan_backend(options);
  if (is_registered_backend(options.device)) return registered().at(name_of(options.device))(options);
  std::string others;
  for (const auto& [name, make] : registered()) others += ", " + name;
  fail_usage("there is no device '{}': expected cpu, ref{} or plan", options.device, others);
}

}  // namespace dspark::model
