// `train --ranks N` on one machine: this process starts its own command line N times, each as one of N ranks, and waits for them.
//
// Rank 0 has the terminal. The others' lines come with their rank before them; the last words of one that fails come once, at the end.
// Signals go on to all ranks. When one fails the others get a few seconds to end by themselves. Ranks never outlive this process: they
// stop, with a checkpoint, when it is gone.
#pragma once

#include <cstdint>
#include <string>

namespace dspark::job {

// Returns when all ranks have ended well. Throws an Error 75 when they stopped on request, else one with the reason of the rank that
// failed first; without words where rank 0 has said them. `device` is --device.
void launch_ranks(int64_t ranks, const std::string& device);

}  // namespace dspark::job
