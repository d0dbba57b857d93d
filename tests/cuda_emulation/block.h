// One thread block at work: its threads are fibres on one host thread, run in random order, each until it waits or ends.
//
// What CUDA leaves undefined is a Fault here: barriers that not all threads reach together, warp collectives whose lanes disagree
// or never come, shared memory that is read before it was written, out of bounds, misaligned, raced for between barriers, or
// still the target of an asynchronous copy. Threads of a block are told apart in time by two clocks: the block's epoch (how often
// sync_block has let everybody pass) and the warp's (sync_warp); two accesses of one byte are ordered if they are one thread's,
// lie in different epochs, or in one warp and different warp epochs.
#pragma once

#include <boost/context/fiber.hpp>
#include <cstdint>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace dspark::emulation {

class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Where in the kernel's source something happened.
struct Site {
  const char* file = "";
  int line = 0;
  static Site current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  bool operator==(const Site& o) const { return line == o.line && (file == o.file || std::string(file) == o.file); }
};

struct Launch {
  int64_t grid_x = 1, grid_y = 1;
  int threads = 0;
  int shared_bytes = 0;
  std::function<void()> kernel;
};

// Runs all blocks, in random order. Throws the first Fault.
void run_grid(const Launch& launch);

// Seeds every random choice of the emulation; tests that want other orders change it.
void set_seed(uint64_t seed);
uint64_t random_bits();
inline uint64_t random_below(uint64_t n) { return random_bits() % n; }

class Block {
 public:
  Block(const Launch& launch, int64_t x, int64_t y);
  void run();

  // The block whose thread is running on this host thread; a Fault outside kernels.
  static Block& current();

  const Launch& launch() const { return launch_; }
  int64_t x() const { return x_; }
  int64_t y() const { return y_; }
  int thread() const { return running_; }

  // ---- shared memory: every access of the running thread
  const char* read_shared(int64_t offset, int64_t bytes, int64_t align);
  char* write_shared(int64_t offset, int64_t bytes, int64_t align);
  void cp_async(int64_t offset, const void* from, int64_t bytes, bool valid);
  void cp_async_commit();
  void cp_async_wait(int pending);

  // ---- collectives
  void sync_block(Site site);
  void sync_warp(Site site);
  // Waits until all lanes of `mask` have called the same collective; the last one computes. lanes[l] is what lane l gave as `mine`,
  // null outside the mask.
  using Compute = void (*)(Block& block, void* const* lanes, uint32_t mask);
  void collective(const char* what, Site site, uint32_t mask, void* mine, Compute compute);

  [[noreturn]] void fault(const std::string& message) const;

 private:
  enum class State : uint8_t { ready, at_barrier, at_collective, ended };
  struct AsyncCopy {
    int64_t offset, bytes;
    const char* from;  // null: zeros
    int group;
  };
  struct Thread {
    boost::context::fiber fiber, scheduler;
    const void* stack = nullptr;
    State state = State::ready;
    Site site;
    uint32_t warp_epoch = 0;
    int groups = 0;  // committed so far
    std::vector<AsyncCopy> copies;
  };
  // Lanes that wait for each other. Disjoint parts of a warp may be at different ones.
  struct Meeting {
    const char* what;
    Site site;
    uint32_t mask = 0, arrived = 0;
    void* lanes[32] = {};
  };
  struct Byte {
    enum : uint8_t { never_written, written, in_flight } state = never_written;
    int16_t writer = -1, reader = -1, reader_warp = -1;  // reader: -2 when several
    uint32_t write_epoch = 0, write_warp_epoch = 0, read_epoch = 0, read_warp_epoch = 0;
  };

  Thread& me() { return threads_[static_cast<size_t>(running_)]; }
  void start(int thread);
  void resume(int thread);
  void yield();
  void pass_barrier();
  void check_meetings(const std::vector<Meeting>& meetings) const;
  void check_shared(int64_t offset, int64_t bytes, int64_t align, const char* verb) const;
  void check_write(Byte& b, int64_t offset);
  std::string stuck() const;

  const Launch& launch_;
  int64_t x_, y_;
  int running_ = -1;
  uint32_t epoch_ = 0;
  std::vector<Thread> threads_;
  std::vector<std::vector<Meeting>> meetings_;  // of each warp
  std::vector<char> shared_;
  std::vector<Byte> bytes_;
  std::exception_ptr failure_;  // of the first thread that had one; the others then end at once
  const void* host_stack_ = nullptr;
  size_t host_stack_bytes_ = 0;
};

}  // namespace dspark::emulation
