#include "formats/hs_folder.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "formats/safetensors.h"

namespace dspark::formats {
namespace {

std::string hs_name(uint64_t number) { return fmt::format("hs_{}.safetensors", number); }

// The numbers of the hs files in a folder, ascending.
std::vector<uint64_t> list_hs(const fs::path& folder) {
  std::vector<uint64_t> out;
  std::error_code ec;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end; it.increment(ec)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with("hs_") || !name.ends_with(".safetensors")) continue;
    const std::string digits = name.substr(3, name.size() - 15);
    if (digits.empty() || digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos) continue;
    const uint64_t number = std::stoull(digits);
    if (hs_name(number) == name) out.push_back(number);
  }
  std::sort(out.begin(), out.end());
  return out;
}

fs::path files_folder(const fs::path& folder) { return list_hs(folder).empty() ? folder / "hidden_states" : folder; }

SampleTokens read_tokens(const SafetensorsFile& file, bool assume_full_mask) {
  SampleTokens out;
  for (int64_t id : read_i64(file.get("token_ids"))) {
    DS_REQUIRE(id >= 0 && id <= INT32_MAX, "{}: token id {} is out of range", file.path().string(), id);
    out.token_ids.push_back(static_cast<int32_t>(id));
  }
  const TensorView* mask = file.find("loss_mask");
  if (!mask) {
    DS_REQUIRE(
        assume_full_mask,
        "{} has no loss_mask, so nothing says which tokens the target wrote. speculators keeps the mask in the Arrow "
        "data set beside the folder, which dspark does not read yet: add it to each file as a tensor `loss_mask` [T] "
        "of 0 and 1, or make a store with `dspark extract --data`",
        file.path().string());
    out.loss_mask.assign(out.token_ids.size(), 1);
    return out;
  }
  for (int64_t m : read_i64(file.get("loss_mask", {static_cast<int64_t>(out.token_ids.size())}))) {
    DS_REQUIRE(m == 0 || m == 1, "{}: a loss_mask of {}, expected 0 or 1", file.path().string(), m);
    out.loss_mask.push_back(static_cast<uint8_t>(m));
  }
  return out;
}

}  // namespace

bool is_hs_folder(const fs::path& folder) { return !list_hs(files_folder(folder)).empty(); }

HsFolder::HsFolder(const fs::path& folder, const OpenOptions& options) : folder_(folder), files_(files_folder(folder)) {
  identity_.last_state = LastState::pre_norm;
  identity_.codec = StoreCodec::raw;
  for (uint64_t number : list_hs(files_)) add(number, options);
  DS_REQUIRE(!infos_.empty(), "{}: no hs file can be read{}{}", files_.string(), problems_.empty() ? "" : ": ",
             problems_.empty() ? "" : problems_[0].text());
}

void HsFolder::add(uint64_t number, const OpenOptions& options) {
  const std::string name = hs_name(number);
  std::unique_ptr<SafetensorsFile> file;
  try {
    file = std::make_unique<SafetensorsFile>(files_ / name);
    const TensorView& states = file->get("hidden_states");
    DS_REQUIRE(states.shape.size() == 3 && states.shape[0] > 0 && states.shape[1] > 0 && states.shape[2] > 0,
               "hidden_states {}, expected [T, L+1, E]", shape_text(states.shape));
    DS_REQUIRE(states.dtype == DType::bf16 || states.dtype == DType::f16 || states.dtype == DType::f32,
               "hidden_states of {}", dtype_name(states.dtype));
    file->get("token_ids", {states.shape[0]});
    DS_REQUIRE(infos_.empty() || (states.shape[1] == identity_.n_parts() && states.shape[2] == identity_.hidden_size),
               "hidden_states {}, the files before have {} parts of {}", shape_text(states.shape), identity_.n_parts(),
               identity_.hidden_size);
  } catch (const Error& e) {
    problems_.push_back({name, 0, e.what()});
    return;
  }
  const auto& shape = file->get("hidden_states").shape;
  if (infos_.empty()) {
    const size_t L = static_cast<size_t>(shape[1] - 1);
    DS_REQUIRE(options.taps.empty() || options.taps.size() == L, "{}: {} taps asked, hidden_states {} holds {}",
               file->path().string(), options.taps.size(), shape_text(shape), L);
    identity_.taps = options.taps.empty() ? std::vector<int>(L, kUnknownTap) : options.taps;
    identity_.hidden_size = shape[2];
    check_identity(identity_, file->path().string());
  }
  const SampleTokens tokens = read_tokens(*file, options.assume_full_mask);
  SampleInfo info;
  info.id = info.conversation = number;
  info.n_tokens = shape[0];
  info.n_mask = std::count(tokens.loss_mask.begin(), tokens.loss_mask.end(), 1);
  info.stored_bytes = fs::file_size(file->path());
  infos_.push_back(info);
}

const SampleInfo& HsFolder::info(int64_t i) const {
  DS_ASSERT(i >= 0 && i < size(), "sample {} of {}", i, size());
  return infos_[static_cast<size_t>(i)];
}

fs::path HsFolder::file_of(int64_t i) const { return files_ / hs_name(info(i).id); }

SampleTokens HsFolder::tokens(int64_t i) const {
  // Without the tensor the folder would not have opened but for assume_full_mask.
  return read_tokens(SafetensorsFile(file_of(i)), true);
}

void HsFolder::read_states(int64_t i, bf16* dst, int64_t row_stride, RowRange rows, std::span<const int> parts) const {
  const StateSelection sel = select_states(*this, i, row_stride, rows, parts);
  const SafetensorsFile file(file_of(i));
  const int64_t E = identity_.hidden_size, P = identity_.n_parts();
  const TensorView& states = file.get("hidden_states", {info(i).n_tokens, P, E});
  std::vector<bf16> rounded;
  if (states.dtype != DType::bf16) rounded = read_bf16(states);
  const std::byte* src = rounded.empty() ? states.data.data() : reinterpret_cast<const std::byte*>(rounded.data());
  for (int64_t r = sel.begin; r < sel.end; ++r)
    for (size_t p = 0; p < sel.parts.size(); ++p)
      std::memcpy(dst + (r - sel.begin) * row_stride + static_cast<int64_t>(p) * E,
                  src + (r * P + sel.parts[p]) * E * 2, static_cast<size_t>(E) * 2);
}

std::string HsFolder::check(int64_t i) const {
  try {
    const SafetensorsFile file(file_of(i));
    file.get("hidden_states", {info(i).n_tokens, identity_.n_parts(), identity_.hidden_size});
    read_tokens(file, true);
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

}  // namespace dspark::formats
