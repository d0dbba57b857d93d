// A folder of hs_{i}.safetensors, as vLLM's hidden-states connector and speculators leave it, read as a SampleSource:
// `hidden_states` [T, L+1, E] (the last state before the final norm comes last) and `token_ids` [T] a file, one file a
// sample. Sample ids are the numbers in the names; gaps are allowed.
//
// The files do not say which layers the taps are (OpenOptions::taps does). The loss mask is read from a `loss_mask` [T]
// tensor in each file; speculators keeps it in an Arrow data set beside the folder, which is not read here: without the
// tensor, opening is an Error unless OpenOptions::assume_full_mask. There are no checksums. States other than bf16 are
// rounded to it. Files are opened again for each read, since a folder may hold more of them than a process may map.
#pragma once

#include "formats/sample_source.h"

namespace dspark::formats {

// The folder itself, or its `hidden_states` folder, holds hs_{i}.safetensors.
bool is_hs_folder(const fs::path& folder);

class HsFolder : public SampleSource {
 public:
  // A file that cannot be read or has another width is reported by problems() and left out.
  HsFolder(const fs::path& folder, const OpenOptions& options);

  std::string_view kind() const override { return "hs folder"; }
  const fs::path& path() const override { return folder_; }
  const StoreIdentity& identity() const override { return identity_; }
  int64_t size() const override { return static_cast<int64_t>(infos_.size()); }
  const SampleInfo& info(int64_t i) const override;
  const std::vector<StoreProblem>& problems() const override { return problems_; }
  SampleTokens tokens(int64_t i) const override;
  void read_states(int64_t i, bf16* dst, int64_t row_stride, RowRange rows = {},
                   std::span<const int> parts = {}) const override;
  std::string check(int64_t i) const override;

 private:
  fs::path file_of(int64_t i) const;
  void add(uint64_t number, const OpenOptions& options);

  fs::path folder_, files_;
  StoreIdentity identity_;
  std::vector<SampleInfo> infos_;
  std::vector<StoreProblem> problems_;
};

}  // namespace dspark::formats
