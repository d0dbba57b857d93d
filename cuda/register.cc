// The one place through which the rest of the program reaches this folder.
#include "cuda/backend.h"
#include "cuda/nccl.h"

namespace dspark::cuda {
namespace {

const model::RegisteredBackend registration("cuda", [](const model::BackendOptions& options) {
  const Driver& driver = nvidia_driver();  // first: where both are missing, this is what to say
  return make_backend_on(options, driver, nvidia_blas());
});

const model::RegisteredCollectives ranks("cuda", [](model::Context& ctx, net::Mesh& mesh, const model::CollectiveOptions& options) {
  return make_nccl_collectives(ctx, mesh, {options}, nvidia_nccl());
});

}  // namespace
}  // namespace dspark::cuda
