// Loading a shared library of NVIDIA's at run time.
#pragma once

#include <initializer_list>
#include <string>

namespace dspark::cuda {

class Library {
 public:
  // Tries the names in order; throws an Error with what the loader said and `wanted` ("a driver for CUDA 13, 580 or newer").
  Library(std::initializer_list<const char*> names, const std::string& wanted);
  // Throws when the library is too old to have it.
  void* symbol(const char* name) const;

 private:
  void* handle_ = nullptr;
  std::string name_, wanted_;
};

}  // namespace dspark::cuda
