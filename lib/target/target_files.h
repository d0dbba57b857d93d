// A target on disk: a Hugging Face folder or a GGUF file. Config, tokenizer, chat template and weights behind one door.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/files.h"
#include "formats/chat_template.h"
#include "formats/hf_config.h"
#include "formats/loss_mask.h"
#include "formats/safetensors.h"
#include "formats/tokenizer.h"
#include "target/target_model.h"

namespace dspark::target {

class TargetFiles {
 public:
  // Throws: no such path, neither kind, an architecture or quantisation that is not supported (by name).
  explicit TargetFiles(const fs::path& path);
  ~TargetFiles();

  const fs::path& path() const { return path_; }
  std::string name() const;  // the folder's or file's name
  const formats::TargetConfig& config() const { return config_; }
  const std::string& config_hash() const { return config_hash_; }
  std::string quantisation() const;  // "BF16", "Q4_1 with Q6_K", ...
  // SHA-256 of samples of the weights as they are stored: the first, middle and last 4 KiB of up to 1024 tensors, spread over the
  // names. It tells checkpoints of one architecture apart; it is no checksum of the file.
  std::string weights_hash() const;
  // Config and weights in one: what decides the states.
  std::string id() const;
  // Loaded on first use; an Error when the target carries none.
  const formats::Tokenizer& tokenizer() const;
  bool has_chat_template() const;
  const formats::ChatTemplate& chat_template() const;
  // The template bound to this tokenizer's bos and eos.
  formats::Render render() const;
  formats::ChatOptions chat_options() const;

  // By Hugging Face names and in their order of rows, whatever the file does. Throws when a value is not finite.
  std::vector<float> tensor(const std::string& name) const;
  TensorLoader loader() const;

 private:
  struct Source;
  fs::path path_;
  formats::TargetConfig config_;
  std::string config_hash_;
  std::unique_ptr<Source> source_;
};

}  // namespace dspark::target
