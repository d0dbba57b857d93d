// Values that are no numbers: damage in a file, or a computation that left its precision.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

namespace dspark {

// Where the first NaN or infinity stands, or nothing.
std::optional<size_t> first_non_finite(std::span<const float> values);

}  // namespace dspark
