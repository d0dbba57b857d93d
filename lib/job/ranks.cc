#include "job/ranks.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "core/log.h"
#include "core/threads.h"
#include "train/host_collectives.h"
#include "train/shards.h"

namespace dspark::job {

namespace {

// The GPU of a rank: the one that it sees, or the one of its number on this machine.
std::string device_of(const net::Place& place) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const bool one = visible != nullptr && std::string_view(visible).find(',') == std::string_view::npos;
  return one ? "cuda:0" : fmt::format("cuda:{}", place.local_rank);
}

// `auto` takes a GPU where there is one.
bool is_there(const std::string& device) {
  try {
    model::BackendOptions options;
    options.device = device;
    (void)model::make_backend(options);
    return true;
  } catch (const Error&) {
    return false;
  }
}

int threads_of() {
  const char* here = std::getenv("LOCAL_WORLD_SIZE");  // torchrun's; Slurm gives each task processors of its own
  return here == nullptr ? 0 : std::max(1, usable_cores() / std::max(1, std::atoi(here)));
}

}  // namespace

void RankSession::meet(CommonOptions& common, double timeout_s) {
  if (!several()) return;
  if (asked_ > 1 && asked_ != place_.size) fail_usage("--ranks {}: {} say that there are {}; leave --ranks out where srun or torchrun starts them", asked_, place_.source, place_.size);
  const bool may = common.device == "auto" && model::is_registered_backend("cuda") && common.precision != "fp64";
  const bool gpus = may && is_there(device_of(place_));
  DS_REQUIRE(!may || gpus || !is_there("cuda:0"), "rank {} is number {} on this machine and has no GPU of its own ({} is not there): start as many ranks as there are GPUs, or --device cpu", place_.rank,
             place_.local_rank, device_of(place_));
  if (common.device == "cuda" || gpus) common.device = device_of(place_);
  if (common.threads == 0) common.threads = threads_of();
  const auto less = [&] { if (!first()) set_log_level(std::min(log_level(), LogLevel::warn)); };
  if (asked_ > 1) less();  // on the terminal of the one that started them
  log_info("rank {} of {} ({}), rank 0 at {} port {}", place_.rank, place_.size, place_.source, place_.address, place_.port);
  mesh_ = net::meet(place_, timeout_s);
  less();
}

std::unique_ptr<model::Collectives> RankSession::join(model::Context& ctx) {
  if (!several()) return nullptr;
  auto collectives = train::make_collectives(ctx, *mesh_, {train::shard_group_ranks(place_.size)});
  log_info("{}", collectives->describe());
  return collectives;
}

void RankSession::abort(const std::string& reason) noexcept {
  if (mesh_) mesh_->abort(reason);
}

}  // namespace dspark::job
