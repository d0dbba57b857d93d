#include "job/shapes.h"

#include "core/error.h"
#include "model/drafter_files.h"

namespace dspark::job {

using namespace model;

namespace {

// A row of the table; every target's widths are its config.json's.
struct Entry {
  const char* name;
  int64_t hidden, heads, kv_heads, head_dim, ffn, vocab;
  std::vector<int> taps;
  int64_t layers, block, rank, window;  // window > 0: sliding layers
  int64_t row_tokens, anchors;
};

std::vector<Entry> table() {
  return {
      {"tiny", 64, 4, 2, 16, 128, 997, {1, 2}, 2, 7, 16, 0, 64, 16},
      {"small", 576, 9, 3, 64, 1536, 49152, {2, 9, 15, 22, 28}, 5, 7, 256, 0, 512, 128},  // SmolLM2-135M
      {"qwen3-0.6b", 1024, 16, 8, 128, 3072, 151936, {2, 8, 14, 20, 26}, 5, 7, 256, 0, 1024, 128},
      {"qwen3-8b", 4096, 32, 8, 128, 12288, 151936, {2, 10, 18, 26, 34}, 5, 7, 256, 0, 4096, 512},
      {"kimi-k3", 7168, 96, 16, 64, 14336, 163840, {24, 48, 72, 88, 92}, 5, 8, 256, 2048, 8192, 1024},
  };
}

}  // namespace

Shape measured_shape(const std::string& name_or_file, int64_t tokens, int64_t anchors) {
  Shape shape = find_shape(name_or_file);
  if (tokens > 0) shape.row_tokens = tokens;
  if (anchors > 0) shape.anchors = anchors;
  DS_REQUIRE(shape.row_tokens > 8 && shape.anchors >= 1 && shape.anchors < shape.row_tokens, "bench: {} anchors in a row of {} tokens; give --tokens above 8 and fewer --anchors than those", shape.anchors,
             shape.row_tokens);
  return shape;
}

std::string shape_names() {
  std::string names;
  for (const Entry& e : table()) names += (names.empty() ? "" : ", ") + std::string(e.name);
  return names;
}

Shape find_shape(const std::string& name, int64_t row_tokens, int64_t anchors) {
  for (const Entry& e : table()) {
    if (name != e.name) continue;
    DrafterConfig c;
    c.hidden = c.target_hidden = e.hidden, c.ffn = e.ffn;
    c.heads = e.heads, c.kv_heads = e.kv_heads, c.head_dim = e.head_dim;
    c.vocab = c.draft_vocab = e.vocab;
    c.mask_token = e.vocab - 1;
    c.layers.assign(static_cast<size_t>(e.layers), e.window > 0 ? LayerType::sliding : LayerType::full);
    for (int n : e.taps) c.taps.push_back({n});
    c.block = e.block, c.rank = e.rank, c.window = e.window;
    c.max_position = 8192;
    return {e.name, c, e.row_tokens, e.anchors};
  }
  fs::path file = name;
  std::error_code ec;
  if (fs::is_directory(file, ec)) file /= "config.json";
  if (!fs::exists(file, ec)) fail_usage("--shape {}: neither a file nor one of {}", name, shape_names());
  DrafterFormat format;
  return {name, read_drafter_config(file, &format), row_tokens, anchors};
}

}  // namespace dspark::job
