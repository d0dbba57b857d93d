#include <catch2/catch.hpp>

#include "compare.h"

using namespace dspark::test;

namespace {
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
Array one(double v) { return Array(1, 1, {v}); }
}  // namespace

TEST_CASE("compare accepts what is within the tolerance and says where it is not", "[compare]") {
  CHECK(compare(one(1.0), one(1.0), 0.0).ok);
  CHECK(compare(one(1.5), one(1.0), 0.5).ok);
  CHECK_FALSE(compare(one(1.5), one(1.0), 0.4).ok);
  CHECK_FALSE(compare(one(1.0), one(-1.0), 0.5).ok);   // opposite signs
  CHECK_FALSE(compare(one(1e-3), one(0.0), 1e-4).ok);  // zero reference
  CHECK(compare(one(-0.0), one(0.0), 0.0).ok);
  CHECK_FALSE(compare(Array(1, 2, {1, 2}), Array(2, 1, {1, 2}), 1.0).ok);
  CHECK(compare(Array(0, 3), Array(0, 3), 0.0).ok);
  const Comparison c = compare(Array(1, 3, {1, 2, 9}), Array(1, 3, {1, 2, 3}), 0.5);
  CHECK(c.text.find("(0, 2)") != std::string::npos);
  CHECK(c.worst == Approx(12));
}

TEST_CASE("compare never lets a value pass that is not finite", "[compare]") {
  for (const double tolerance : {0.0, 1e300, kInf}) {
    CHECK_FALSE(compare(one(kNan), one(1.0), tolerance).ok);
    CHECK_FALSE(compare(one(1.0), one(kNan), tolerance).ok);
    CHECK_FALSE(compare(one(kNan), one(kNan), tolerance).ok);
    CHECK_FALSE(compare(one(kInf), one(1.0), tolerance).ok);
    CHECK_FALSE(compare(one(1.0), one(-kInf), tolerance).ok);
    CHECK_FALSE(compare(one(kInf), one(-kInf), tolerance).ok);
    CHECK(compare(one(-kInf), one(-kInf), tolerance).ok);
  }
  CHECK_FALSE(compare(one(1.0), one(1.1), kNan).ok);  // a tolerance that is NaN allows nothing
  CHECK(compare(Array(1, 2, {kNan, 1}), Array(1, 2, {1, 1}), 1.0).worst == kInf);
}

TEST_CASE("relative_error is a ratio of norms and infinite where that means nothing", "[compare]") {
  CHECK(relative_error(Array(1, 2, {3, 4}), Array(1, 2, {3, 4})) == 0);
  CHECK(relative_error(Array(1, 2, {3, 9}), Array(1, 2, {3, 4})) == Approx(1));
  CHECK(relative_error(one(-2), one(2)) == Approx(2));
  CHECK(relative_error(one(0.5), one(0)) == Approx(0.5));
  CHECK(relative_error(one(kNan), one(1)) == kInf);
  CHECK(relative_error(one(kInf), one(kInf)) == kInf);
  CHECK(relative_error(Array(1, 2), Array(2, 1)) == kInf);
}
