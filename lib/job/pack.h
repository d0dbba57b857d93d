// pack: drafter folders from one format to another, or looked at.
#pragma once

#include <string>

#include "core/files.h"

namespace dspark::job {

struct PackOptions {
  fs::path drafter, out, target;
  std::string to = "speculators", json;
  std::string rotary;  // how the drafter was trained, where its config does not say: served or reference
  bool inspect = false;
};

void run_pack(const PackOptions& options);

}  // namespace dspark::job
