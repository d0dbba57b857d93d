// The words that options, config files and reports use for a drafter's choices.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "model/drafter_config.h"

namespace dspark::model {

const char* markov_name(Markov head);
std::optional<Markov> parse_markov(std::string_view name);
const char* layer_type_name(LayerType type);
std::optional<LayerType> parse_layer_type(std::string_view name);
// "full,sliding,full": one for each layer.
std::string layer_type_names(const std::vector<LayerType>& layers);
const char* layout_name(bool sample_from_anchor);  // anchor | bonus
const char* rotary_name(formats::Rotary rotary);

}  // namespace dspark::model
