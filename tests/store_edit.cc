#include "store_edit.h"

#include "core/error.h"
#include "formats/safetensors.h"
#include "formats/store.h"

using namespace dspark;
using namespace dspark::formats;

void copy_store(const fs::path& from, const fs::path& to, const std::function<void(int64_t, std::vector<bf16>&)>& edit) {
  const StoreReader reader(from);
  StoreWriter writer(to, reader.identity());
  const int64_t width = reader.identity().row_width();
  for (int64_t i = 0; i < reader.size(); ++i) {
    const auto tokens = reader.tokens(i);
    std::vector<bf16> states(tokens.token_ids.size() * static_cast<size_t>(width));
    reader.read_states(i, states.data(), width);
    edit(i, states);
    writer.append(encode_record(writer.format(), {.id = reader.info(i).id, .token_ids = tokens.token_ids, .loss_mask = tokens.loss_mask, .states = states.data(), .row_stride = width, .conversation = reader.info(i).conversation}));
  }
  writer.finish();
}

void write_hs_folder(const fs::path& from, const fs::path& to) {
  const StoreReader reader(from);
  make_folder(to);
  for (int64_t i = 0; i < reader.size(); ++i) {
    const auto tokens = reader.tokens(i);
    const auto n = static_cast<int64_t>(tokens.token_ids.size());
    std::vector<bf16> states(static_cast<size_t>(n * reader.row_width()));
    reader.read_states(i, states.data(), reader.row_width());
    SafetensorsWriter w(to / fmt::format("hs_{}.safetensors", i), {{"hidden_states", DType::bf16, {n, reader.identity().n_parts(), reader.identity().hidden_size}}, {"token_ids", DType::i64, {n}}, {"loss_mask", DType::u8, {n}}});
    const std::vector<int64_t> ids(tokens.token_ids.begin(), tokens.token_ids.end());
    for (const TensorSpec& spec : w.specs()) {
      if (spec.name == "token_ids") w.write(spec.name, ids);
      else if (spec.name == "loss_mask") w.write(spec.name, std::vector<uint8_t>(tokens.loss_mask.begin(), tokens.loss_mask.end()));
      else w.write(spec.name, states);
    }
    w.finish();
  }
}

std::vector<int> taps_of(const fs::path& store) { return StoreReader(store).identity().taps; }
