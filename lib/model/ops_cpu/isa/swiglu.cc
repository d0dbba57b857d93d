// silu(gate) * up and its gradient. gate and up are the halves of one tensor, so they share a type.
#include "model/ops_cpu/isa/math.h"

namespace dspark::model::cpu::DS_ISA {

void swiglu(Out y, In gate, In up, int64_t n) {
  with(y, [&](auto* __restrict out) {
    with(gate, [&](auto* __restrict g) {
      const auto* __restrict u = static_cast<decltype(g)>(up.p);
      for (int64_t i = 0; i < n; ++i) {
        const float x = load(g[i]);
        store(out + i, x * sigmoid_f(x) * load(u[i]));
      }
    });
  });
}

void swiglu_backward(Out d_gate, Out d_up, In dy, In gate, In up, int64_t n) {
  with(d_gate, [&](auto* __restrict dg) {
    auto* __restrict du = static_cast<decltype(dg)>(d_up.p);
    with(gate, [&](auto* __restrict g) {
      const auto* __restrict u = static_cast<decltype(g)>(up.p);
      with(dy, [&](auto* __restrict d) {
        for (int64_t i = 0; i < n; ++i) {
          const float x = load(g[i]), out = load(d[i]);
          const float s = sigmoid_f(x), xs = x * s;
          store(dg + i, out * load(u[i]) * (s + xs * (1.0f - s)));
          store(du + i, out * xs);
        }
      });
    });
  });
}

}  // namespace dspark::model::cpu::DS_ISA
