// The one place through which the rest of the program reaches this folder.
#include "cuda/backend.h"

namespace dspark::cuda {
namespace {

const model::RegisteredBackend registration("cuda", [](const model::BackendOptions& options) { return make_backend_on(options, nvidia_driver(), nvidia_blas()); });

}  // namespace
}  // namespace dspark::cuda
