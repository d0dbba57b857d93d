#include "train/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "formats/safetensors.h"

namespace dspark::train {

using namespace model;
using formats::SafetensorsFile;
using formats::SafetensorsWriter;
using formats::TensorSpec;

namespace {

fs::path checkpoints_folder(const fs::path& out) { return out / "checkpoints"; }

// fp32 stays fp32; the reference's fp64 is kept as fp64, so that a resume is exact there too.
DType file_dtype(const Context& ctx) { return ctx.acc_dtype() == DType::f32 ? DType::f32 : DType::f64; }

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

void write_tensors(const fs::path& path, Context& ctx, const std::vector<NamedTensor>& tensors) {
  const DType dtype = file_dtype(ctx);
  std::vector<TensorSpec> specs;
  for (const auto& t : tensors) specs.push_back({t.name, dtype, {t.tensor.rows, t.tensor.cols}});
  SafetensorsWriter writer(path, specs);
  std::vector<std::byte> host;
  for (const TensorSpec& spec : writer.specs()) {
    const auto it = std::find_if(tensors.begin(), tensors.end(), [&](const NamedTensor& t) { return t.name == spec.name; });
    host.resize(static_cast<size_t>(it->tensor.size() * dtype_bytes(dtype)));
    ctx.download_now({host.data(), dtype, it->tensor.rows, it->tensor.cols, it->tensor.cols}, it->tensor);
    writer.write(spec.name, host);
  }
  writer.finish();
}

// `kind`.safetensors, or what each owner wrote: `kind`-00001-of-00004.safetensors.
std::string file_name(const char* kind, int64_t place, int64_t owners) {
  return owners == 1 ? fmt::format("{}.safetensors", kind) : fmt::format("{}-{:05}-of-{:05}.safetensors", kind, place + 1, owners);
}

std::vector<SafetensorsFile> open_files(const FoundCheckpoint& c, const char* kind, const Json& state) {
  std::vector<SafetensorsFile> files;
  const int64_t owners = state.value("owners", int64_t{1});
  for (int64_t place = 0; place < owners; ++place) files.emplace_back(c.folder / file_name(kind, place, owners));
  return files;
}

void read_tensors(const std::vector<SafetensorsFile>& files, Context& ctx, const std::vector<NamedTensor>& tensors) {
  for (const auto& t : tensors) {
    const auto it = std::find_if(files.begin(), files.end(), [&](const SafetensorsFile& f) { return f.find(t.name) != nullptr; });
    const SafetensorsFile& file = it == files.end() ? files.front() : *it;
    const auto& view = file.get(t.name, {t.tensor.rows, t.tensor.cols});
    DS_REQUIRE(view.dtype == file_dtype(ctx), "{}: tensor '{}' is {}, this run's precision needs {}; resume with the precision it was saved with",
               file.path().string(), t.name, dtype_name(view.dtype), dtype_name(file_dtype(ctx)));
    ctx.upload_now(t.tensor, {view.data.data(), view.dtype, t.tensor.rows, t.tensor.cols, t.tensor.cols});
  }
}

std::vector<NamedTensor> masters(Drafter& drafter) {
  std::vector<NamedTensor> out;
  for (const Parameter& p : drafter.parameters())
    if (p.owned) out.push_back({p.name, p.master});
  return out;
}

std::vector<NamedTensor> states(Optimizer& optimizer) {
  std::vector<NamedTensor> out;
  for (const auto& s : optimizer.states()) {
    if (s.m) out.push_back({"m." + s.name, s.m});
    if (s.v) out.push_back({"v." + s.name, s.v});
  }
  return out;
}

// A file's size and checksum, for state.json.
Json describe_file(const fs::path& path) {
  const MappedFile file(path);
  return {{"bytes", file.size()}, {"crc32c", crc32c(file.bytes())}};
}

constexpr const char* kOwnChecksum = "crc32c";  // of everything else in state.json, from format 1.2 on

bool is_whole(const Json& state, const char* key, int64_t least, int64_t most) {
  const auto it = state.find(key);
  if (it == state.end() || !it->is_number_integer() || (it->is_number_unsigned() && it->get<uint64_t>() > INT64_MAX)) return false;
  return it->get<int64_t>() >= least && it->get<int64_t>() <= most;
}

// state.json of the checkpoint of this step. Throws when it is not what was written there: its own checksum, then what a checksum that
// somebody put right, or an older format without one, lets through.
Json read_state(const fs::path& folder, int64_t step) {
  const fs::path path = folder / "state.json";
  Json s = read_json(path);
  DS_REQUIRE(s.is_object(), "{}: not a JSON object", path.string());
  const Json crc = s.value(kOwnChecksum, Json()), version = s.value("format_version", Json());
  s.erase(kOwnChecksum);
  DS_REQUIRE(crc.is_null() || crc == json_checksum(s), "{} is damaged (its checksum is another one)", path.string());
  DS_REQUIRE(version.is_string() && (!crc.is_null() || version == "1.0" || version == "1.1"), "{}: its checksum is missing", path.string());
  const auto require = [&](bool good, const char* key, const std::string& wanted) {
    DS_REQUIRE(good, "{}: '{}' is {}, expected {}", path.string(), key, s.contains(key) ? printable(s.at(key).dump(-1, ' ', false, Json::error_handler_t::replace), 80) : "missing", wanted);
  };
  if (!version.get<std::string>().starts_with("1.")) return s;  // another format: read_checkpoint_state says so
  if (s.contains("owners")) require(is_whole(s, "owners", 1, kMostRanksOfAGroup), "owners", fmt::format("a number from 1 to {}", kMostRanksOfAGroup));
  require(is_whole(s, "step", step, step), "step", fmt::format("{}, as in the folder's name", step));
  require(is_whole(s, "optimizer_steps", 0, step), "optimizer_steps", fmt::format("a number from 0 to {}", step));
  if (s.contains("validation_tau")) require(s.at("validation_tau").is_number() && s.at("validation_tau") >= 0, "validation_tau", "an accepted length");
  require(version == "1.0" || (s.contains("files") && s.at("files").is_object()), "files", "the sizes and checksums of the other files");
  return s;
}

// What is wrong with a checkpoint, or nothing. State files of format 1.0 know nothing of the others.
std::string damage(const FoundCheckpoint& c) {
  try {
    const Json state = read_state(c.folder, c.step);
    const Json files = state.value("files", Json::object());
    for (const auto& [name, said] : files.items()) {
      if (!said.is_object() || !is_whole(said, "bytes", 0, INT64_MAX) || !is_whole(said, "crc32c", 0, UINT32_MAX)) return fmt::format("state.json says no size and checksum of {}", name);
      const MappedFile file(c.folder / name);
      const auto bytes = said.at("bytes").get<uint64_t>();
      if (file.size() != bytes) return fmt::format("{} has {} bytes, {} were written", name, file.size(), bytes);
      if (crc32c(file.bytes()) != said.at("crc32c").get<uint32_t>()) return fmt::format("{} is damaged (its checksum is another one)", name);
    }
  } catch (const std::exception& e) {
    return json_error(e);
  }
  return "";
}

// Under a name that is no checkpoint's first: a removal that is interrupted leaves nothing that looks whole.
void discard(const fs::path& folder) {
  const fs::path name = folder.parent_path() / ("removing-" + folder.filename().string());
  std::error_code ec;
  fs::remove_all(name, ec);
  fs::rename(folder, name, ec);
  fs::remove_all(name, ec);
}

// A checkpoint that could not be written (a full disk) takes no room afterwards.
struct RemoveUnlessRenamed {
  fs::path folder;
  ~RemoveUnlessRenamed() {
    std::error_code ec;
    if (!folder.empty()) fs::remove_all(folder, ec);  // after the rename there is nothing of this name
  }
};
}  // namespace

void save_checkpoint(const fs::path& out, int64_t step, Drafter& drafter, Optimizer& optimizer, const Json& state,
                     const std::function<void(const fs::path&)>& extra) {
  Collectives& ranks = *optimizer.sharing().ranks;
  const fs::path parent = checkpoints_folder(out), final_name = parent / fmt::format("step-{:08}", step);
  const fs::path temporary = parent / fmt::format("writing-{:08}", step);
  const bool first = ranks.rank() == 0;
  if (first) {
    make_folder(parent);
    fs::remove_all(temporary);
    make_folder(temporary);
  }
  const RemoveUnlessRenamed guard{first ? temporary : fs::path()};
  ranks.barrier();
  Json files = Json::object();
  if (ranks.rank() < ranks.group()) {
    DS_REQUIRE(fs::is_directory(temporary), "rank {} does not see {}, which rank 0 has made: --out must be in a folder that all ranks share", ranks.rank(), temporary.string());
    const auto write = [&](const char* kind, const std::vector<NamedTensor>& tensors) {
      const std::string name = file_name(kind, ranks.place(), ranks.group());
      write_tensors(temporary / name, drafter.context(), tensors);
      files[name] = describe_file(temporary / name);
    };
    write("masters", masters(drafter));
    write("optimizer", states(optimizer));
  }
  const std::vector<std::string> of_ranks = ranks.gather(files.dump());
  const int64_t optimizer_steps = optimizer.steps();
  if (!first) return ranks.barrier();
  for (const std::string& text : of_ranks) files.update(Json::parse(text));
  if (extra) extra(temporary);
  for (const auto& entry : fs::directory_iterator(temporary)) {
    const std::string name = entry.path().filename().string();
    if (!files.contains(name)) files[name] = describe_file(entry.path());
  }
  Json s = state;
  s["format_version"] = ranks.group() > 1 ? "1.3" : "1.2";
  s["step"] = step;
  s["optimizer_steps"] = optimizer_steps;
  if (ranks.group() > 1) s["owners"] = ranks.group();
  s["files"] = files;
  s[kOwnChecksum] = json_checksum(s);
  write_text_atomic(temporary / "state.json", s.dump(1, ' ', false, Json::error_handler_t::replace));
  fsync_path(temporary);
  std::error_code ec;
  if (fs::exists(final_name)) discard(final_name);  // no whole checkpoint: a run goes on from the newest of those
  fs::rename(temporary, final_name, ec);
  DS_REQUIRE(!ec, "cannot rename {} to {}: {}", temporary.string(), final_name.string(), ec.message());
  fsync_path(parent);
  ranks.barrier();
}

namespace {
std::vector<FoundCheckpoint> list_checkpoints(const fs::path& out) {
  std::vector<FoundCheckpoint> found;
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(checkpoints_folder(out), ec)) {
    const std::string name = entry.path().filename().string();
    int64_t step = 0;
    const char* end = name.data() + name.size();
    if (!name.starts_with("step-")) continue;
    if (const auto [stop, error] = std::from_chars(name.data() + 5, end, step); error != std::errc() || stop != end || step < 0) continue;
    found.push_back({entry.path(), step});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.step > b.step; });
  return found;
}
}  // namespace

void prune_checkpoints(const fs::path& out, int64_t keep) {
  const auto found = list_checkpoints(out);
  const auto best = best_checkpoint(out);
  for (size_t i = static_cast<size_t>(std::max<int64_t>(keep, 1)); i < found.size(); ++i)
    if (!best || found[i].step != best->checkpoint.step) discard(found[i].folder);
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(checkpoints_folder(out), ec)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("writing-") || name.starts_with("removing-")) fs::remove_all(entry.path(), ec);
  }
}

std::optional<FoundCheckpoint> newest_checkpoint(const fs::path& out) {
  for (const FoundCheckpoint& c : list_checkpoints(out)) {
    const std::string wrong = damage(c);
    if (wrong.empty()) return c;
    const fs::path aside = checkpoints_folder(out) / fmt::format("damaged-{:08}", c.step);
    log_warn("checkpoint {}: {}; it is set aside as {}", c.folder.string(), wrong, aside.filename().string());
    std::error_code ec;
    fs::remove_all(aside, ec);
    fs::rename(c.folder, aside, ec);
    DS_REQUIRE(!ec, "cannot rename {} to {}: {}", c.folder.string(), aside.string(), ec.message());
  }
  return std::nullopt;
}

std::optional<FoundCheckpoint> newest_checkpoint(const fs::path& out, Collectives& ranks) {
  std::optional<FoundCheckpoint> found;
  if (ranks.rank() == 0) found = newest_checkpoint(out);
  double step_plus_one = found ? static_cast<double>(found->step) + 1 : 0;
  ranks.sum({&step_plus_one, 1});
  if (ranks.rank() > 0 && step_plus_one > 0) {
    const auto step = static_cast<int64_t>(step_plus_one) - 1;
    found = {checkpoints_folder(out) / fmt::format("step-{:08}", step), step};
  }
  return found;
}

bool has_checkpoint(const fs::path& out) { return !list_checkpoints(out).empty(); }

std::optional<BestCheckpoint> best_checkpoint(const fs::path& out) {
  std::optional<BestCheckpoint> best;
  for (const FoundCheckpoint& c : list_checkpoints(out)) {  // newest first
    try {
      const double tau = read_checkpoint_state(c).value("validation_tau", -1.0);
      if (tau >= (best ? best->tau : 0)) best = {c, tau};
    } catch (const std::exception& e) {
      log_warn("checkpoint {}: {}", c.folder.string(), json_error(e));
    }
  }
  return best;
}

Json read_checkpoint_state(const FoundCheckpoint& c) {
  Json s = read_state(c.folder, c.step);
  const std::string version = s.at("format_version");
  DS_REQUIRE(version.starts_with("1."), "{}: checkpoint format '{}' is not one this version reads (1.x)", c.folder.string(), version);
  return s;
}

void load_checkpoint(const FoundCheckpoint& c, Drafter& drafter, Optimizer& optimizer) {
  Context& ctx = drafter.context();
  const Json state = read_checkpoint_state(c);
  read_tensors(open_files(c, "masters", state), ctx, masters(drafter));
  for (const Parameter& p : drafter.parameters())
    if (p.cast_on_update()) copy(ctx, {p.value, p.master});
  optimizer.gather_weights();
  drafter.refresh();
  read_tensors(open_files(c, "optimizer", state), ctx, states(optimizer));
  optimizer.set_steps(state.at("optimizer_steps").get<int64_t>());
}

}  // namespace dspark::train
