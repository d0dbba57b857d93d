// The reference backend: host memory, queues that run inline, one scalar type for everything.
#include <cstdlib>

#include "model/backends.h"
#include "model/host_blocks.h"
#include "model/ops_ref/convert.h"
#include "model/ops_ref/scalar.h"

namespace dspark::model {
namespace {

class RefDevice final : public Device {
 public:
  explicit RefDevice(DType dtype) : dtype_(dtype) {}
  std::string name() const override { return "ref"; }
  DType act_dtype() const override { return dtype_; }
  DType acc_dtype() const override { return dtype_; }

  Address allocate(int64_t bytes) override {
    DS_ASSERT(bytes >= 0, "{} bytes", bytes);
    void* p = std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64 + 64));
    DS_REQUIRE(p != nullptr, "the reference backend cannot allocate {} bytes of memory", bytes);
    return BackendAccess::make(blocks_.keep(p));
  }
  void free(Address a) override { blocks_.free(BackendAccess::raw(a)); }

  Event upload(Queue, const Tensor& dst, const ConstHostMatrix& src) override {
    DS_ASSERT(dst.rows == src.rows && dst.cols == src.cols, "upload of [{}, {}] to [{}, {}]", src.rows, src.cols,
              dst.rows, dst.cols);
    ref::convert(BackendAccess::raw(dst.data), dst.dtype, dst.stride, src.data, src.dtype, src.stride, dst.rows,
                 dst.cols);
    return {};
  }
  Event download(Queue, const HostMatrix& dst, const Tensor& src) override {
    DS_ASSERT(dst.rows == src.rows && dst.cols == src.cols, "download of [{}, {}] to [{}, {}]", src.rows, src.cols,
              dst.rows, dst.cols);
    ref::convert(dst.data, dst.dtype, dst.stride, BackendAccess::raw(src.data), src.dtype, src.stride, dst.rows,
                 dst.cols);
    return {};
  }

  Event record(Queue) override { return {}; }
  void wait(Queue, Event) override {}
  void synchronize(Event) override {}

 private:
  DType dtype_;
  HostBlocks blocks_;
};

template <typename S>
class RefOps final : public Ops {
 public:
#define DS_IMPLEMENT(name, Args) \
  void name(Context&, const Args& a) override { ref::name<S>(a); }
  DS_OPS(DS_IMPLEMENT)
#undef DS_IMPLEMENT
};

template <typename S>
class RefBackend final : public Backend {
 public:
  RefBackend() : device_(ref::dtype_of<S>()), context_(ops_, device_) {}
  Context& context() override { return context_; }
  std::string describe() const override { return sizeof(S) == 16 ? "ref complex128, scalar" : "ref fp64, scalar"; }

 private:
  RefOps<S> ops_;
  RefDevice device_;
  Context context_;
};

}  // namespace

std::unique_ptr<Backend> make_ref_backend(const BackendOptions& options) {
  if (options.precision == Precision::complex128) return std::make_unique<RefBackend<ref::Complex>>();
  DS_REQUIRE(options.precision == Precision::fp64, "the reference backend computes in fp64 or complex128 only");
  return std::make_unique<RefBackend<double>>();
}

}  // namespace dspark::model
