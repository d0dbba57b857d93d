// Stores as others leave them: copies with other states, folders of hs files.
#pragma once

#include <functional>
#include <vector>

#include "core/dtype.h"
#include "core/files.h"

// Copies a store; `edit` may change a sample's states.
void copy_store(const dspark::fs::path& from, const dspark::fs::path& to, const std::function<void(int64_t, std::vector<dspark::bf16>&)>& edit);
// A store's samples as speculators' extractor writes them, with loss masks.
void write_hs_folder(const dspark::fs::path& from, const dspark::fs::path& to);
std::vector<int> taps_of(const dspark::fs::path& store);
