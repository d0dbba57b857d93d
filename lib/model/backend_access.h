// How a backend turns addresses into pointers. Only lib/model/ops_* and cuda/ may include this (a test enforces it).
#pragma once

#include "model/tensor.h"

namespace dspark::model {

struct BackendAccess {
  static Address make(void* p) { return Address(reinterpret_cast<uintptr_t>(p)); }
  static Address make(uintptr_t bits) { return Address(bits); }
  static void* raw(Address a) { return reinterpret_cast<void*>(a.bits_); }
};

template <typename T>
T* pointer(const Tensor& t) {
  return static_cast<T*>(BackendAccess::raw(t.data));
}

}  // namespace dspark::model
