// The table of this ISA level.
#include "model/ops_cpu/kernels.h"

namespace dspark::model::cpu::DS_ISA {
namespace {
constexpr Kernels kTable = {
#define DS_ENTRY(result, name, params) &name,
    DS_KERNELS(DS_ENTRY)
#undef DS_ENTRY
};
}  // namespace

const Kernels* kernels() { return &kTable; }

}  // namespace dspark::model::cpu::DS_ISA
