// The one place through which the rest of the program reaches this folder.
#include "cuda/backend.h"

namespace dspark::cuda {
namespace {

const model::RegisteredBackend registration("cuda", [](const model::BackendOptions& options) {
  const Driver& driver = nvidia_driver();  // first: where both are missing, this is what to say
  return make_backend_on(options, driver, nvidia_blas());
});

}  // namespace
}  // namespace dspark::cuda
