#include "model/drafter_names.h"

namespace dspark::model {

namespace {
constexpr Markov kHeads[] = {Markov::none, Markov::vanilla, Markov::gated, Markov::rnn};
constexpr LayerType kTypes[] = {LayerType::full, LayerType::sliding};
}  // namespace

const char* markov_name(Markov head) {
  switch (head) {
    case Markov::none: return "none";
    case Markov::vanilla: return "vanilla";
    case Markov::gated: return "gated";
    case Markov::rnn: return "rnn";
  }
  return "?";
}

std::optional<Markov> parse_markov(std::string_view name) {
  for (const Markov head : kHeads)
    if (name == markov_name(head)) return head;
  return std::nullopt;
}

const char* layer_type_name(LayerType type) { return type == LayerType::full ? "full" : "sliding"; }

std::optional<LayerType> parse_layer_type(std::string_view name) {
  for (const LayerType type : kTypes)
    if (name == layer_type_name(type)) return type;
  return std::nullopt;
}

std::string layer_type_names(const std::vector<LayerType>& layers) {
  std::string names;
  for (const LayerType type : layers) names += std::string(names.empty() ? "" : ",") + layer_type_name(type);
  return names;
}

const char* layout_name(bool sample_from_anchor) { return sample_from_anchor ? "anchor" : "bonus"; }

const char* rotary_name(formats::Rotary rotary) {
  return rotary == formats::Rotary::served ? "served" : rotary == formats::Rotary::reference ? "reference" : "unknown";
}

}  // namespace dspark::model
