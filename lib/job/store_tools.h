// What `extract --inspect`, `--verify` and `--merge` do to a store on disk. Every kind that open_store() reads is
// taken.
#pragma once

#include <string>
#include <vector>

#include "core/json.h"
#include "formats/store.h"

namespace dspark::job {

// What to do about a store that is not whole, or holds states that are not finite.
std::string how_to_mend(const fs::path& store);

// Throws when a source that is to be trained on is damaged; says what an unfinished store is and has. Work on part of what was meant
// would be another run, with nobody the wiser.
void require_whole(const formats::SampleSource& source);

// Throws (exit 2) when `out`, or a folder above it, is a store, or one of `stores`: what is in a store is the store's. With `inside`, `out`
// itself may be one.
void require_outside_stores(const fs::path& out, bool inside = false, const std::vector<fs::path>& stores = {});

// Counts, sizes, identity and what opening found wrong; no states are read.
Json inspect_store(const fs::path& path, const formats::OpenOptions& options = {});
// The same as a table for people.
std::string store_table(const Json& inspected);

struct StoreCheck {
  int64_t samples = 0;     // listed and whole
  uint64_t bytes = 0;      // read
  std::vector<formats::StoreProblem> not_finite;  // samples with a NaN or infinity: stored as it was, not damage
  bool complete = true;    // a dspark store that was finished
  std::vector<formats::StoreProblem> problems;
};
// Reads everything: every checksum, every block decoded. Damage is listed, not thrown.
StoreCheck verify_store(const fs::path& path, const formats::OpenOptions& options = {});

struct MergeResult {
  int64_t samples = 0;                          // in the output now
  int64_t added = 0;                            // by this call
  int64_t duplicates = 0;                       // the same sample (same id, tokens and mask) in two inputs, kept once
  std::vector<formats::StoreProblem> problems;  // samples of the inputs that are damaged or not finite, left out
};
// Writes the samples of all inputs, in order, to one store. dspark stores must have equal identities and are copied
// record by record; foreign kinds are encoded with `codec`, their ids made from the content. Resumes like any writer.
// An Error: the identities differ, or two different samples share an id.
MergeResult merge_stores(const std::vector<fs::path>& inputs, const fs::path& out,
                         formats::StoreCodec codec = formats::StoreCodec::zstd,
                         const formats::OpenOptions& options = {});

}  // namespace dspark::job
