#include "target_run.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>

namespace dspark::test {

using namespace model;
using namespace target;

LoadedTarget::LoadedTarget(const fs::path& path, Precision precision, int threads)
    : files(path), fp32(precision == Precision::fp32) {
  BackendOptions options;
  options.precision = precision;
  options.threads = threads;
  backend = make_backend(options);
  decoder = std::make_unique<TargetModel>(backend->context(), files.config(), files.loader());
}

bool SequenceStates::operator==(const SequenceStates& other) const {
  auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  return same(states, other.states) && same(normed, other.normed) && same(logits, other.logits);
}

std::vector<SequenceStates> run_target(LoadedTarget& target, const std::vector<std::vector<int32_t>>& sequences,
                                       const std::vector<int>& taps, const std::vector<Call>& calls) {
  TargetModel& model = *target.decoder;
  Context& ctx = model.context();
  const auto& c = target.config();
  const int64_t e = c.hidden, width = (static_cast<int64_t>(taps.size()) + 1) * e;
  std::vector<SequenceStates> out(sequences.size());
  std::vector<KvCache> caches;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const size_t n = sequences[i].size();
    caches.push_back(model.make_cache(static_cast<int64_t>(n)));
    out[i].states.resize(n * static_cast<size_t>(width));
    out[i].normed.resize(n * static_cast<size_t>(e));
    out[i].logits.resize(n * static_cast<size_t>(c.vocab));
  }
  int64_t most = 0;
  for (const Call& call : calls) {
    int64_t n = 0;
    for (const Piece& p : call) n += p.rows;
    most = std::max(most, n);
  }
  Arena arena(ctx.device(),
              TargetModel::arena_bytes(c, target.fp32, most, most) + most * (width * 4 + 64) + (int64_t{1} << 20));
  for (const Call& call : calls) {
    arena.release(0);
    std::vector<int32_t> tokens;
    std::vector<Segment> segments;
    std::vector<int64_t> begins;
    for (const Piece& p : call) {
      KvCache& cache = caches[p.sequence];
      const auto first = sequences[p.sequence].begin() + cache.length;
      tokens.insert(tokens.end(), first, first + p.rows);
      begins.push_back(cache.length);
      segments.push_back({&cache, p.rows});
    }
    const auto n = static_cast<int64_t>(tokens.size());
    const Tensor ids = arena.vector(DType::i32, n), states = arena.matrix(DType::f32, n, width);
    ctx.upload_now(ids, {tokens.data(), DType::i32, 1, n, n});
    const Tensor normed = model.forward(arena, ids, segments, taps, states);
    const Tensor logits = arena.matrix(ctx.acc_dtype(), n, c.vocab);
    model.logits(normed, logits);
    int64_t row = 0;
    for (size_t i = 0; i < call.size(); ++i) {
      SequenceStates& s = out[call[i].sequence];
      const int64_t at = begins[i], rows = call[i].rows;
      ctx.download_now({s.states.data() + at * width, DType::f32, rows, width, width}, states.row_range(row, rows));
      ctx.download_now({s.normed.data() + at * e, DType::f32, rows, e, e}, normed.row_range(row, rows));
      ctx.download_now({s.logits.data() + at * c.vocab, DType::f32, rows, c.vocab, c.vocab},
                       logits.row_range(row, rows));
      row += rows;
    }
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    REQUIRE(caches[i].length == static_cast<int64_t>(sequences[i].size()));
    model.free_cache(caches[i]);
  }
  return out;
}

SequenceStates run_target(LoadedTarget& target, const std::vector<int32_t>& ids, const std::vector<int>& taps) {
  return std::move(run_target(target, {ids}, taps, {{{0, static_cast<int64_t>(ids.size())}}}).front());
}

fs::path smollm2_path() {
  const char* cache = std::getenv("DSPARK_MODEL_CACHE");
  const char* home = std::getenv("HOME");
  const fs::path folder = cache ? fs::path(cache) : fs::path(home ? home : "") / ".cache/dspark";
  const fs::path path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!fs::exists(path))
    FAIL(path.string() << " is missing: run `make model`, or set DSPARK_MODEL_CACHE to its folder");
  return path;
}

}  // namespace dspark::test
