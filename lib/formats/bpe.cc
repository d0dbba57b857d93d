#include "formats/bpe.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/error.h"

namespace dspark::formats {

namespace {

// (left, right) -> (rank, merged): open addressing, power-of-two size, at most half full.
class MergeTable {
 public:
  explicit MergeTable(std::span<const MergeRule> merges) {
    size_t size = 16;
    while (size < 2 * merges.size()) size *= 2;
    slots_.assign(size, {});
    mask_ = size - 1;
    for (size_t rank = 0; rank < merges.size(); ++rank) {
      const MergeRule& m = merges[rank];
      const uint64_t k = key(m.left, m.right);
      size_t i = home(k);
      while (slots_[i].key != kEmpty && slots_[i].key != k) i = (i + 1) & mask_;
      // A pair listed twice keeps its later rank, as in the published tokenizers, which read the list into a map.
      slots_[i] = {k, static_cast<int32_t>(rank), m.merged};
    }
  }
  struct Slot {
    uint64_t key = kEmpty;
    int32_t rank = 0, merged = 0;
  };
  const Slot* find(int32_t left, int32_t right) const {
    const uint64_t k = key(left, right);
    for (size_t i = home(k);; i = (i + 1) & mask_) {
      if (slots_[i].key == k) return &slots_[i];
      if (slots_[i].key == kEmpty) return nullptr;
    }
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static uint64_t key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  size_t home(uint64_t k) const { return (k * 0x9E3779B97F4A7C15ull >> 20) & mask_; }
  std::vector<Slot> slots_;
  size_t mask_ = 0;
};

struct PieceHash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>{}(s); }
};

constexpr size_t kShards = 64;
constexpr size_t kShardPieces = 4096;  // 262,144 pieces in all: text has that many different words, not more
constexpr size_t kLongestCached = 64;  // bytes; longer pieces hardly ever come back

struct Shard {
  std::mutex mutex;
  std::unordered_map<std::string, std::vector<int32_t>, PieceHash, std::equal_to<>> pieces;
};

}  // namespace

struct Bpe::Impl {
  std::array<int32_t, 256> byte_ids;
  MergeTable merges;
  std::array<Shard, kShards> shards;

  void merge(std::string_view piece, int32_t unknown, std::vector<int32_t>& ids) const;
};

Bpe::Bpe(const std::array<int32_t, 256>& byte_ids, std::span<const MergeRule> merges)
    : impl_(new Impl{byte_ids, MergeTable(merges), {}}) {}
Bpe::~Bpe() = default;
Bpe::Bpe(Bpe&&) noexcept = default;

void Bpe::Impl::merge(std::string_view piece, int32_t unknown, std::vector<int32_t>& ids) const {
  struct Symbol {
    int32_t id, previous, next;
  };
  struct Candidate {
    int32_t rank, position, merged;
  };
  // std::push_heap keeps the largest on top: later ranks and positions are "smaller".
  auto later = [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  };
  DS_REQUIRE(piece.size() < (size_t{1} << 31), "tokenizer: a piece of {} bytes without any border is too long",
             piece.size());
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (char c : piece) {
    const int32_t id = byte_ids[static_cast<uint8_t>(c)] >= 0 ? byte_ids[static_cast<uint8_t>(c)] : unknown;
    if (id < 0) continue;
    const auto n = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, n - 1, n + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;

  std::vector<Candidate> heap;
  auto consider = [&](int32_t position) {
    const Symbol& left = symbols[static_cast<size_t>(position)];
    if (left.next < 0) return;
    const int32_t right = symbols[static_cast<size_t>(left.next)].id;
    if (const auto* slot = merges.find(left.id, right)) heap.push_back({slot->rank, position, slot->merged});
  };
  for (int32_t i = 0; i + 1 < static_cast<int32_t>(symbols.size()); ++i) consider(i);
  std::make_heap(heap.begin(), heap.end(), later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Candidate top = heap.back();
    heap.pop_back();
    Symbol& left = symbols[static_cast<size_t>(top.position)];
    // Stale: one of the two was merged into something else meanwhile (a merged-away symbol has id -1). Neighbours that
    // changed but still make the same token go together now, as in Hugging Face's tokenizers and in llama.cpp.
    if (left.id < 0 || left.next < 0) continue;
    const auto* now = merges.find(left.id, symbols[static_cast<size_t>(left.next)].id);
    if (!now || now->merged != top.merged) continue;
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    left.id = top.merged;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = top.position;
    for (const int32_t position : {left.previous, top.position}) {
      if (position < 0) continue;
      const size_t before = heap.size();
      consider(position);
      if (heap.size() != before) std::push_heap(heap.begin(), heap.end(), later);
    }
  }
  for (int32_t i = 0; i >= 0; i = symbols[static_cast<size_t>(i)].next)
    ids.push_back(symbols[static_cast<size_t>(i)].id);
}

void Bpe::encode(std::string_view piece, int32_t unknown, std::vector<int32_t>& ids) const {
  if (piece.size() > kLongestCached) return impl_->merge(piece, unknown, ids);
  Shard& shard = impl_->shards[PieceHash{}(piece) % kShards];
  {
    const std::lock_guard lock(shard.mutex);
    if (const auto it = shard.pieces.find(piece); it != shard.pieces.end()) {
      ids.insert(ids.end(), it->second.begin(), it->second.end());
      return;
    }
  }
  std::vector<int32_t> fresh;
  impl_->merge(piece, unknown, fresh);
  ids.insert(ids.end(), fresh.begin(), fresh.end());
  const std::lock_guard lock(shard.mutex);
  if (shard.pieces.size() >= kShardPieces) shard.pieces.clear();
  shard.pieces.emplace(piece, std::move(fresh));
}

}  // namespace dspark::formats
