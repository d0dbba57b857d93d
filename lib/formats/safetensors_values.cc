// Tensor values converted to the types that code works on.
#include <cstring>

#include "core/error.h"
#include "formats/safetensors.h"

namespace dspark::formats {
namespace {

// Loads through memcpy: data of foreign files may be unaligned.
template <typename T>
T load(const std::byte* p, size_t i) {
  T v;
  std::memcpy(&v, p + i * sizeof(T), sizeof(T));
  return v;
}

template <typename T>
T convert(double v) {
  return static_cast<T>(v);
}
template <>
bf16 convert<bf16>(double v) {
  return to_bf16(static_cast<float>(v));
}
template <typename T>
T convert(float v) {
  return static_cast<T>(v);
}
template <>
bf16 convert<bf16>(float v) {
  return to_bf16(v);
}

template <typename T>
void read_any(const TensorView& t, std::span<T> out) {
  DS_ASSERT(static_cast<int64_t>(out.size()) == t.count(), "{} elements for tensor '{}' of {}", out.size(), t.name,
            t.count());
  const std::byte* p = t.data.data();
  const size_t n = out.size();
  switch (t.dtype) {
    case DType::f32:
      for (size_t i = 0; i < n; ++i) out[i] = convert<T>(load<float>(p, i));
      return;
    case DType::f64:
      for (size_t i = 0; i < n; ++i) out[i] = convert<T>(load<double>(p, i));
      return;
    case DType::bf16:
      if constexpr (std::is_same_v<T, bf16>) {
        if (n > 0) std::memcpy(out.data(), p, n * sizeof(bf16));
      } else {
        for (size_t i = 0; i < n; ++i) out[i] = convert<T>(to_float(load<bf16>(p, i)));
      }
      return;
    case DType::f16:
      for (size_t i = 0; i < n; ++i) out[i] = convert<T>(f16_to_float(load<uint16_t>(p, i)));
      return;
    default:
      fail("tensor '{}' holds {}, expected a floating-point type", t.name, dtype_name(t.dtype));
  }
}

template <typename T>
std::vector<T> read_vector(const TensorView& t) {
  std::vector<T> out(static_cast<size_t>(t.count()));
  read_any<T>(t, out);
  return out;
}

}  // namespace

void read_into(const TensorView& t, std::span<float> out) { read_any(t, out); }
void read_into(const TensorView& t, std::span<double> out) { read_any(t, out); }
void read_into(const TensorView& t, std::span<bf16> out) { read_any(t, out); }
std::vector<float> read_f32(const TensorView& t) { return read_vector<float>(t); }
std::vector<double> read_f64(const TensorView& t) { return read_vector<double>(t); }
std::vector<bf16> read_bf16(const TensorView& t) { return read_vector<bf16>(t); }

std::vector<int64_t> read_i64(const TensorView& t) {
  std::vector<int64_t> out(static_cast<size_t>(t.count()));
  const std::byte* p = t.data.data();
  for (size_t i = 0; i < out.size(); ++i) switch (t.dtype) {
      case DType::i64:
        out[i] = load<int64_t>(p, i);
        break;
      case DType::i32:
        out[i] = load<int32_t>(p, i);
        break;
      case DType::u8:
      case DType::boolean:
        out[i] = load<uint8_t>(p, i);
        break;
      default:
        fail("tensor '{}' holds {}, expected an integer type", t.name, dtype_name(t.dtype));
    }
  return out;
}

}  // namespace dspark::formats
