#include "formats/sample_source.h"

#include "core/error.h"
#include "formats/deepspec_cache.h"
#include "formats/hs_folder.h"
#include "formats/store.h"

namespace dspark::formats {

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::given:
      return "given";
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
  }
  return "unknown";
}

std::string StoreProblem::text() const { return fmt::format("{} at {}: {}", file, offset, what); }

std::unique_ptr<SampleSource> open_store(const fs::path& path, const OpenOptions& options) {
  DS_REQUIRE(fs::exists(path), "{}: no such store", path.string());
  DS_REQUIRE(fs::is_directory(path), "{} is not a store: a store is a folder", path.string());
  if (is_store(path)) return std::make_unique<StoreReader>(path);
  if (is_deepspec_cache(path)) return std::make_unique<DeepSpecCache>(path);
  if (is_hs_folder(path)) return std::make_unique<HsFolder>(path, options);
  fail(
      "{} is not a store: expected a dspark store (shard-*.dss), a DeepSpec target cache (samples.idx) or a folder of "
      "hs_*.safetensors; make one with `dspark extract --out {}`",
      path.string(), path.string());
}

StateSelection select_states(const SampleSource& source, int64_t i, int64_t row_stride, RowRange rows,
                             std::span<const int> parts) {
  const int64_t n_tokens = source.info(i).n_tokens;
  const int n_parts = source.identity().n_parts();
  StateSelection s{rows.begin, rows.end < 0 ? n_tokens : rows.end, {parts.begin(), parts.end()}};
  if (s.parts.empty())
    for (int p = 0; p < n_parts; ++p) s.parts.push_back(p);
  DS_REQUIRE(0 <= s.begin && s.begin <= s.end && s.end <= n_tokens,
             "{}: rows [{}, {}) asked of sample {}, which has {} tokens", source.path().string(), s.begin, s.end, i,
             n_tokens);
  for (int p : s.parts)
    DS_REQUIRE(0 <= p && p < n_parts, "{}: part {} asked, but there are {} taps and a last state",
               source.path().string(), p, n_parts - 1);
  const int64_t width = static_cast<int64_t>(s.parts.size()) * source.identity().hidden_size;
  DS_ASSERT(row_stride >= width, "row_stride {} for rows of {} elements", row_stride, width);
  return s;
}

std::optional<StatePosition> first_non_finite(const bf16* states, int64_t n_rows, int64_t width, int64_t row_stride) {
  for (int64_t r = 0; r < n_rows; ++r) {
    const bf16* row = states + r * row_stride;
    unsigned any = 0;  // an exponent of all ones is an infinity or a NaN
    for (int64_t c = 0; c < width; ++c) any |= (row[c].bits & 0x7f80u) == 0x7f80u;
    if (!any) continue;
    for (int64_t c = 0; c < width; ++c)
      if ((row[c].bits & 0x7f80u) == 0x7f80u) return StatePosition{r, c, to_float(row[c])};
  }
  return std::nullopt;
}

}  // namespace dspark::formats
