// The direction of includes (one way, from the command down to core) and who may see what.
#include <catch2/catch.hpp>

#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "core/files.h"

namespace {

namespace fs = std::filesystem;

struct Include {
  std::string file;    // relative to the source folder: lib/model/ops.h
  std::string target;  // as written: model/tensor.h, CLI/CLI.hpp
};

std::vector<Include> includes_under(const std::vector<std::string>& folders) {
  const fs::path root = DSPARK_SOURCE_DIR;
  static const std::regex pattern(R"(^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"])");
  std::vector<Include> found;
  for (const std::string& folder : folders) {
    if (!fs::exists(root / folder)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string extension = entry.path().extension();
      if (!std::set<std::string>{".h", ".cc", ".cu", ".cuh"}.count(extension)) continue;
      const std::string text = dspark::read_text(entry.path());
      size_t begin = 0;
      while (begin < text.size()) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        const std::string line = text.substr(begin, end - begin);
        if (std::smatch match; std::regex_search(line, match, pattern))
          found.push_back({fs::relative(entry.path(), root).string(), match[1].str()});
        begin = end + 1;
      }
    }
  }
  return found;
}

std::string first_folder(const std::string& path) { return path.substr(0, path.find('/')); }
bool starts_with(const std::string& text, const std::string& prefix) { return text.rfind(prefix, 0) == 0; }
bool ends_with(const std::string& text, const std::string& suffix) {
  return text.size() >= suffix.size() && text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
}

// What a folder of lib may include: itself and these.
const std::map<std::string, std::set<std::string>> kMayInclude = {
    {"core", {}},
    {"formats", {"core"}},
    {"model", {"core", "formats"}},
    {"target", {"core", "formats", "model"}},
    {"spec", {"core", "formats", "model", "target"}},
    {"net", {"core"}},
    {"train", {"core", "formats", "model", "target", "net"}},
    {"job", {"core", "formats", "model", "target", "spec", "train", "net"}},
};

}  // namespace

TEST_CASE("includes in lib point one way", "[structure]") {
  const std::vector<Include> all = includes_under({"lib"});
  REQUIRE(all.size() > 50);
  for (const Include& i : all) {
    const std::string from = first_folder(i.file.substr(4)), to = first_folder(i.target);
    INFO(i.file << " includes " << i.target);
    REQUIRE(kMayInclude.count(from) == 1);  // a new folder states its place here
    if (kMayInclude.count(to) && i.target.find('/') != std::string::npos)
      CHECK((to == from || kMayInclude.at(from).count(to)));
    CHECK_FALSE(starts_with(i.target, ".."));
    CHECK(to != "cmd");
    CHECK(to != "cuda");
  }
}

TEST_CASE("third-party headers stay where they belong", "[structure]") {
  const std::vector<Include> all = includes_under({"lib", "cmd", "cuda"});
  for (const Include& i : all) {
    INFO(i.file << " includes " << i.target);
    if (starts_with(i.target, "CLI/")) CHECK(starts_with(i.file, "cmd/"));
    if (starts_with(i.target, "cuda") || starts_with(i.target, "cublas")) CHECK(starts_with(i.file, "cuda/"));
    if (starts_with(i.target, "catch2/")) CHECK(false);
  }
}

// json.hpp costs every includer seconds: public headers use core/json.h's forward declaration. A header internal to its
// folder may include it when nothing but .cc files of that folder include that header.
TEST_CASE("the json library is included by .cc files only", "[structure]") {
  const std::vector<Include> all = includes_under({"lib", "cmd", "cuda"});
  for (const Include& i : all) {
    if (i.target != "nlohmann/json.hpp" || ends_with(i.file, ".cc")) continue;
    REQUIRE(starts_with(i.file, "lib/"));
    const std::string header = i.file.substr(4);
    for (const Include& user : all) {
      if (user.target != header) continue;
      INFO(i.file << " includes json.hpp and is included by " << user.file);
      CHECK(ends_with(user.file, ".cc"));
      CHECK(starts_with(user.file, "lib/" + first_folder(header) + "/"));
    }
  }
}

TEST_CASE("only backends turn addresses into pointers", "[structure]") {
  int seen = 0;
  for (const Include& i : includes_under({"lib", "cmd", "cuda"})) {
    if (!ends_with(i.target, "backend_access.h")) continue;
    ++seen;
    INFO(i.file << " includes " << i.target);
    CHECK((starts_with(i.file, "lib/model/ops_") || starts_with(i.file, "cuda/")));
  }
  CHECK(seen > 0);
  // ops_cpu, ops_ref and ops_plan are reached through model/backends.h only; `bench` may measure a kernel by itself.
  for (const Include& i : includes_under({"lib", "cmd", "cuda"})) {
    INFO(i.file << " includes " << i.target);
    const bool backend = starts_with(i.file, "lib/model/ops_") || starts_with(i.file, "cuda/");
    if (starts_with(i.target, "model/ops_")) CHECK((backend || starts_with(i.file, "lib/job/bench_")));
  }
}

// What the emulation cannot see it cannot check: kernels reach threads, shared memory and tensor cores through cuda/device.h only.
TEST_CASE("kernels are written on cuda/device.h, and cuda knows core, model and net only", "[structure]") {
  for (const Include& i : includes_under({"cuda"})) {
    INFO(i.file << " includes " << i.target);
    if (kMayInclude.count(first_folder(i.target))) CHECK((starts_with(i.target, "core/") || starts_with(i.target, "model/") || starts_with(i.target, "net/")));
    if (ends_with(i.target, "cuda_runtime.h")) CHECK(i.file == "cuda/device_cuda.h");
  }
  int kernels = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(fs::path(DSPARK_SOURCE_DIR) / "cuda")) {
    if (entry.path().extension() != ".cu") continue;
    ++kernels;
    const std::string text = dspark::read_text(entry.path());
    for (const char* word : {"threadIdx", "blockIdx", "__shared__", "__sync", "__shfl", "__global__", "__device__", "asm", "atomic", "<<<", "#include <"}) {
      INFO(entry.path().filename().string() << " contains " << word);
      CHECK(text.find(word) == std::string::npos);
    }
  }
  CHECK(kernels >= 13);
}
