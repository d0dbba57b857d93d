// A device whose copies land when they are waited for, and whose waits fail: what is left of a step that another rank ended.
#include <catch2/catch.hpp>

#include <memory>
#include <vector>

#include "core/error.h"
#include "model/backend_access.h"
#include "model/backends.h"
#include "model/readback.h"

using namespace dspark;
using namespace dspark::model;

namespace {

class Late final : public Device {
 public:
  std::string name() const override { return "late"; }
  DType act_dtype() const override { return DType::f32; }
  DType acc_dtype() const override { return DType::f32; }
  Address allocate(int64_t) override { return {}; }
  void free(Address) override {}
  Event upload(Queue, const Tensor&, const ConstHostMatrix&) override { return {}; }
  Event download(Queue, const HostMatrix& dst, const Tensor&) override {
    destinations.push_back(static_cast<double*>(dst.data));
    return {destinations.size()};
  }
  Event record(Queue) override { return {}; }
  void wait(Queue, Event) override {}
  void synchronize(Event e) override {
    if (e.id == 0) return;
    *destinations[e.id - 1] = 7;
    ++landed;
    if (fails) fail("rank 1 ended the run");
  }

  std::vector<double*> destinations;
  int landed = 0;
  bool fails = false;
};

}  // namespace

TEST_CASE("a readback that goes waits for its copy, whatever else fails", "[ops]") {
  Late late;
  const auto ref = make_backend({.device = "ref", .precision = Precision::fp64});
  Context ctx(ref->context().ops(), late);
  const Tensor src{{}, DType::f32, 1, 1, 1};
  {
    std::vector<Readback> step(2);
    step[0].start(ctx, src), step[1].start(ctx, src);
    late.fails = true;
    CHECK_THROWS_WITH(step[0].wait(), "rank 1 ended the run");
    step.resize(5);  // moved while one is under way
    CHECK(late.landed == 1);
  }
  CHECK(late.landed == 3);  // the one that failed is looked at again

  late.fails = false;
  Readback again;
  again.start(ctx, src);
  again.start(ctx, src);  // the first copy is over before its memory is written again
  CHECK(late.landed == 4);
  CHECK(again.wait()[0] == 7);
  CHECK(late.landed == 5);
}
