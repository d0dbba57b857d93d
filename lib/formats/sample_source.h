// What a trainer reads hidden states from, whatever wrote them.
//
// A SampleSource is a read-only list of samples. A sample is one tokenised document: T token ids, a loss mask, and for
// each token the target's states side by side, [T, (L+1)*E] bf16: the L taps in ascending order, then the last state.
// Those L+1 columns of width E are called parts: part j < L is tap j, part L is the last state. Sources are opened by
// open_store(), hold their files mapped, are immutable, and may be read by several threads at once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/files.h"
#include "formats/store_identity.h"

namespace dspark::formats {

// Why the sample's text ends where it ends. `given`: the row came complete with the data, nothing was generated.
enum class FinishReason : uint8_t { given = 0, stop = 1, length = 2 };
std::string_view finish_reason_name(FinishReason reason);

struct SampleInfo {
  uint64_t id = 0;
  int64_t n_tokens = 0;
  int64_t n_mask = 0;  // tokens whose loss mask is set
  FinishReason finish = FinishReason::given;
  uint64_t stored_bytes = 0;  // on disk, everything included
  uint64_t conversation = 0;  // the same for all samples of one conversation; `id` where the format does not say
};

struct SampleTokens {
  std::vector<int32_t> token_ids;  // [T]
  std::vector<uint8_t> loss_mask;  // [T], 0 or 1
};

// Rows [begin, end) of a sample; end -1 means its last row.
struct RowRange {
  int64_t begin = 0, end = -1;
};

// Something that is not as it should be: damage, a cut tail, a sample the manifest counts and no shard holds.
struct StoreProblem {
  std::string file;
  uint64_t offset = 0;
  std::string what;
  bool tail = false;  // what an interrupted writer leaves behind the last whole record: nothing that was stored is lost
  std::string text() const;  // "shard-00001.dss at 4096: ..."
};

class SampleSource {
 public:
  virtual ~SampleSource() = default;

  virtual std::string_view kind() const = 0;  // "dspark store", "DeepSpec target cache", "hs folder"
  virtual const fs::path& path() const = 0;
  virtual const StoreIdentity& identity() const = 0;
  virtual int64_t size() const = 0;
  virtual const SampleInfo& info(int64_t i) const = 0;  // decodes nothing
  // What was found wrong while opening; the samples listed are the whole ones.
  virtual const std::vector<StoreProblem>& problems() const = 0;

  // Throws an Error that names file and offset when the data is damaged.
  virtual SampleTokens tokens(int64_t i) const = 0;
  // Writes rows [rows.begin, rows.end) to dst, the chosen parts side by side in the order given (empty: all L+1,
  // ascending): dst[(r - begin) * row_stride + p * E + e]. row_stride is in elements and at least the width of one
  // output row.
  virtual void read_states(int64_t i, bf16* dst, int64_t row_stride, RowRange rows = {},
                           std::span<const int> parts = {}) const = 0;
  // Reads and checks everything of sample i that the format can check; returns what is wrong, or "".
  virtual std::string check(int64_t i) const = 0;

  int64_t row_width() const { return identity().row_width(); }  // (L+1)*E
};

// What a source that does not say everything itself (an hs folder) is told; ignored by the others.
struct OpenOptions {
  std::vector<int> taps;          // empty: unknown (kUnknownTap), which a trainer refuses
  bool assume_full_mask = false;  // every token counts when there is no loss mask; else that is an Error
};

// A dspark store, a DeepSpec target cache v2 or an hs folder, told apart by what lies in the folder. Throws when it is
// none.
std::unique_ptr<SampleSource> open_store(const fs::path& path, const OpenOptions& options = {});

// Checks `rows` and `parts` of a read against the sample and fills in the defaults; shared by the sources.
struct StateSelection {
  int64_t begin, end;
  std::vector<int> parts;
};
StateSelection select_states(const SampleSource& source, int64_t i, int64_t row_stride, RowRange rows,
                             std::span<const int> parts);

// Where the first NaN or infinity stands in states [rows, width], or nothing.
struct StatePosition {
  int64_t row, column;
  float value;
};
std::optional<StatePosition> first_non_finite(const bf16* states, int64_t n_rows, int64_t width, int64_t row_stride);

}  // namespace dspark::formats
