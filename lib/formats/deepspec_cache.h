// DeepSpec's target cache, version 2, read as a SampleSource:
//
//   manifest.json       version 2, num_samples, num_shards, target_layer_ids, hidden_size, dtypes, shards [{shard_id,
//   file_name}] samples.idx         56-byte records <QIIQQQQQ: sample id, shard id, length S, and byte offsets in the
//   shard of shard-NNNNN.bin     i32 input_ids[S], u8 attention_mask[S], u8 loss_mask[S], bf16 target_hidden_states[S,
//   L*E],
//                       bf16 target_last_hidden_states[S, E]
//
// Its layer ids count from 0 (tap = id + 1) and its last state is after the final norm. The format has no checksums:
// only what contradicts itself can be found. It names the target but not its configuration, tokenizer or vocabulary.
#pragma once

#include "formats/sample_source.h"

namespace dspark::formats {

bool is_deepspec_cache(const fs::path& folder);

class DeepSpecCache : public SampleSource {
 public:
  // Throws on a manifest or index that contradicts itself or the shards.
  explicit DeepSpecCache(const fs::path& folder);

  std::string_view kind() const override { return "DeepSpec target cache"; }
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
  struct Place {
    uint32_t shard;
    uint64_t ids, loss_mask, taps, last;
  };
  const std::byte* at(uint32_t shard, uint64_t offset) const { return shards_[shard].bytes().data() + offset; }

  fs::path folder_;
  StoreIdentity identity_;
  std::vector<MappedFile> shards_;
  std::vector<SampleInfo> infos_;
  std::vector<Place> places_;
  std::vector<StoreProblem> problems_;
};

}  // namespace dspark::formats
