#include "cuda/library.h"

#include <dlfcn.h>

#include "core/error.h"

namespace dspark::cuda {

Library::Library(std::initializer_list<const char*> names, const std::string& wanted) : wanted_(wanted) {
  std::string said;
  for (const char* name : names) {
    name_ = name;
    handle_ = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) return;
    said += (said.empty() ? "" : "; ") + std::string(::dlerror());
  }
  fail("{}: cannot be loaded ({}); wanted: {}", *names.begin(), said, wanted_);
}

void* Library::symbol(const char* name) const {
  void* p = ::dlsym(handle_, name);
  DS_REQUIRE(p != nullptr, "{}: has no {}, so it is too old; wanted: {}", name_, name, wanted_);
  return p;
}

}  // namespace dspark::cuda
