#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include <cstdlib>

// Commands under test would take their rank from these, where the tests themselves run under a launcher.
[[maybe_unused]] static const bool alone = [] {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "TORCHELASTIC_USE_AGENT_STORE"})
    ::unsetenv(name);
  return true;
}();
