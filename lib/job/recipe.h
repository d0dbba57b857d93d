// Recipes: the two public trainers' choices as bundles of defaults (DESIGN 4's table). An option that was given keeps its value;
// the others take the recipe's, and the rest their defaults. `--print-config` lists all of them with where each came from.
#pragma once

#include <string>
#include <vector>

#include "job/train.h"

namespace dspark::job {

struct Setting {
  std::string name, value, source;  // source: "given", "recipe deepspec", "default"
};

// Sets what the recipe decides and nobody gave. Returns all settings of the objective, the optimizer and the drafter's shape.
std::vector<Setting> apply_recipe(TrainOptions& options);

}  // namespace dspark::job
