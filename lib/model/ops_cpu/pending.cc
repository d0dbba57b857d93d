// Operators that are not written yet. Each line goes when its operator comes; the file goes with the last.
#include "core/error.h"
#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {

#define DS_PENDING(name, Args) \
  void CpuOps::name(Context&, const Args&) { DS_ASSERT(false, "cpu: " #name " is not written yet"); }
DS_PENDING(vocab_loss, VocabLoss)
#undef DS_PENDING

}  // namespace dspark::model::cpu
