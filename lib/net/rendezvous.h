// How the ranks of a run, one process each on any machines, find each other: by what the program that started them left in their
// environment, and by a meeting at rank 0. Connections are plain TCP: for a cluster's own network.
#pragma once

#include <memory>
#include <string>

#include "net/mesh.h"

namespace dspark::net {

struct Place {
  int64_t rank = 0, size = 1;
  int64_t local_rank = 0;         // among the ranks of this machine: which GPU
  std::string address;            // rank 0's machine
  int port = 0;                   // where rank 0 listens
  std::string source = "alone";   // which variables said so
};

// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, as torchrun and most others set them; else those of a Slurm step (srun), with
// the step's first node as rank 0's machine. Neither: one rank. Throws, and names the variable, when they do not make sense. RANK or
// WORLD_SIZE alone, set for whatever reason, is one rank only if it says no more than that; with `expect_none` it is nobody's.
Place place_from_environment(bool expect_none = false);

// Meets the others; all of them must come within the deadline, which is then the mesh's. Throws with what is missing.
std::unique_ptr<Mesh> meet(const Place& place, double deadline_s);

// A port of this machine that nobody listens on now.
int free_port();

// The first name of a Slurm node list: "gpu[007-010,12],x1" -> "gpu007".
std::string first_node(const std::string& list);

}  // namespace dspark::net
