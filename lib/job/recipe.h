// Recipes: the two public trainers' choices as bundles of defaults (DESIGN 4's table). An option that was given keeps its value;
// what makes up the drafter comes from the one it continues (--init), the rest takes the recipe's, and what is left its default.
// `--print-config` lists all of them with where each came from.
#pragma once

#include <string>
#include <vector>

#include "job/train.h"

namespace dspark::job {

struct Setting {
  std::string name, value, source;  // source: "given", "init", "recipe deepspec", "default"
  bool is_text = true;              // else `value` is a number, true or false, as JSON spells them
};

// Sets what nobody gave, from the drafter to continue (null: none) and the recipe. Returns all settings that
// decide the drafter or how it is trained, then those of the run.
std::vector<Setting> apply_recipe(TrainOptions& options, const model::DrafterConfig* init = nullptr);

}  // namespace dspark::job
