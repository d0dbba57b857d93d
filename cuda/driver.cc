#include "cuda/driver.h"

#include "core/error.h"
#include "cuda/library.h"

namespace dspark::cuda {

const Driver& nvidia_driver() {
  static const Driver driver = [] {
    static const Library library({kDriverFile}, kDriverWanted);
    Driver d;
#define DS_LOAD(name, parameters) d.name = reinterpret_cast<int(*) parameters>(library.symbol(#name));
    DS_CUDA_DRIVER(DS_LOAD)
#undef DS_LOAD
    return d;
  }();
  return driver;
}

void check(const Driver& driver, int result, const std::string& what) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  if (driver.cuGetErrorString(result, &text) != kSuccess || text == nullptr) text = "unknown error";
  fail("cuda: cannot {}: {} (error {})", what, text, result);
}

}  // namespace dspark::cuda
