// What launches in code compiled by nvcc call on an error: apart, since nvcc cannot compile fmt's headers.
#include "core/error.h"

namespace dspark::cuda {

void check_launch(int error, const char* what, const char* text) { DS_REQUIRE(error == 0, "cuda: cannot {}: {} (error {})", what, text, error); }

}  // namespace dspark::cuda
