#include "cuda_emulation/block.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "cuda_emulation/memory.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace dspark::emulation {
namespace {

thread_local Block* current_block = nullptr;
thread_local uint64_t random_state = 1;

// Fibre stacks, kept for the next block.
class Stacks {
 public:
  static constexpr size_t kBytes = 128 << 10;
  boost::context::stack_context allocate() {
    if (free_.empty()) {
      all_.push_back(std::make_unique<char[]>(kBytes));
      free_.push_back(all_.back().get());
    }
    boost::context::stack_context s;
    s.size = kBytes;
    s.sp = free_.back() + kBytes;
    free_.pop_back();
    return s;
  }
  void deallocate(boost::context::stack_context& s) noexcept { free_.push_back(static_cast<char*>(s.sp) - kBytes); }

 private:
  std::vector<std::unique_ptr<char[]>> all_;
  std::vector<char*> free_;
};

struct StackAllocator {
  const void** bottom;
  static Stacks& pool() {
    static thread_local Stacks stacks;
    return stacks;
  }
  boost::context::stack_context allocate() {
    const boost::context::stack_context s = pool().allocate();
    *bottom = static_cast<char*>(s.sp) - s.size;
    return s;
  }
  void deallocate(boost::context::stack_context& s) noexcept { pool().deallocate(s); }
};

// Thrown into the threads of a block that has failed.
struct Cancelled {};

// The address sanitizer wants to be told which stack is in use.
void leaving([[maybe_unused]] void** save, [[maybe_unused]] const void* bottom, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(save, bottom, bytes);
#endif
}
void entered([[maybe_unused]] void* saved, [[maybe_unused]] const void** bottom, [[maybe_unused]] size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(saved, bottom, bytes);
#endif
}

std::string name(const Site& s) {
  const char* slash = std::strrchr(s.file, '/');
  return fmt::format("{}:{}", slash ? slash + 1 : s.file, s.line);
}

template <typename T>
void shuffle_order(std::vector<T>& v) {
  for (size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[random_below(i)]);
}

}  // namespace

void set_seed(uint64_t seed) { random_state = seed * 2 + 1; }

uint64_t random_bits() {  // splitmix64
  uint64_t z = (random_state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

void run_grid(const Launch& launch) {
  std::vector<int64_t> order(static_cast<size_t>(launch.grid_x * launch.grid_y));
  std::iota(order.begin(), order.end(), int64_t{0});
  shuffle_order(order);
  for (const int64_t i : order) Block(launch, i % launch.grid_x, i / launch.grid_x).run();
}

Block::Block(const Launch& launch, int64_t x, int64_t y)
    : launch_(launch), x_(x), y_(y), threads_(static_cast<size_t>(launch.threads)), meetings_(static_cast<size_t>((launch.threads + 31) / 32)),
      shared_(static_cast<size_t>(launch.shared_bytes)), bytes_(shared_.size()) {}

Block& Block::current() {
  if (current_block == nullptr) throw Fault("a device function was called outside a kernel");
  return *current_block;
}

void Block::fault(const std::string& message) const { throw Fault(fmt::format("block ({}, {}), thread {}: {}", x_, y_, running_, message)); }

void Block::start(int thread) {
  Thread& t = threads_[static_cast<size_t>(thread)];
  t.fiber = boost::context::fiber(std::allocator_arg, StackAllocator{&t.stack}, [this, &t](boost::context::fiber&& scheduler) {
    entered(nullptr, &host_stack_, &host_stack_bytes_);
    t.scheduler = std::move(scheduler);
    try {
      if (!failure_) launch_.kernel();
      if (!failure_ && !t.copies.empty()) fault("the kernel ended before its asynchronous copies were waited for");
    } catch (const Cancelled&) {
    } catch (...) {
      failure_ = std::current_exception();
    }
    t.state = State::ended;
    leaving(nullptr, host_stack_, host_stack_bytes_);
    return std::move(t.scheduler);
  });
}

void Block::resume(int thread) {
  Thread& t = threads_[static_cast<size_t>(thread)];
  running_ = thread;
  void* host = nullptr;
  leaving(&host, t.stack, Stacks::kBytes);
  t.fiber = std::move(t.fiber).resume();
  entered(host, nullptr, nullptr);
}

void Block::yield() {
  Thread& t = me();
  void* own = nullptr;
  leaving(&own, host_stack_, host_stack_bytes_);
  t.scheduler = std::move(t.scheduler).resume();
  entered(own, &host_stack_, &host_stack_bytes_);
  if (failure_) throw Cancelled{};
}

void Block::run() {
  Block* const outer = current_block;
  current_block = this;
  std::vector<int> order(threads_.size());
  std::iota(order.begin(), order.end(), 0);
  for (const int i : order) start(i);
  const auto is_ended = [](const Thread& t) { return t.state == State::ended; };
  while (!failure_ && !std::all_of(threads_.begin(), threads_.end(), is_ended)) {
    shuffle_order(order);
    bool moved = false;
    for (const int i : order) {
      if (threads_[static_cast<size_t>(i)].state != State::ready || failure_) continue;
      moved = true;
      resume(i);
    }
    if (moved) continue;
    try {
      pass_barrier();
    } catch (const Fault&) {
      failure_ = std::current_exception();
    }
  }
  for (const int i : order)
    if (!is_ended(threads_[static_cast<size_t>(i)])) resume(i);  // only after a failure: it ends at once
  current_block = outer;
  if (failure_) std::rethrow_exception(failure_);
}

std::string Block::stuck() const {
  std::string text;
  const auto say = [&](State state, const std::string& what) {
    int count = 0, first = -1;
    Site site;
    for (size_t i = 0; i < threads_.size(); ++i)
      if (threads_[i].state == state && count++ == 0) first = static_cast<int>(i), site = threads_[i].site;
    if (count == 0) return;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, what);
    if (state != State::ended) text += fmt::format(" (thread {} at {})", first, name(site));
  };
  say(State::at_barrier, "at sync_block");
  say(State::at_collective, "at a warp collective");
  say(State::ended, "ended");
  return text;
}

// Nobody can run: these lanes wait in vain.
void Block::check_meetings(const std::vector<Meeting>& meetings) const {
  if (meetings.empty()) return;
  const Meeting &a = meetings.front(), &b = meetings.back();
  const auto place = [](const Meeting& m) { return fmt::format("{} ({})", m.what, name(m.site)); };
  if (meetings.size() == 1) fault(fmt::format("{}: lanes {:#010x} do not come; {}", place(a), a.mask & ~a.arrived, stuck()));
  if (a.site == b.site && std::strcmp(a.what, b.what) == 0) fault(fmt::format("{}: the lanes disagree about the mask: {:#010x} and {:#010x}", place(a), a.mask, b.mask));
  fault(fmt::format("the lanes of a warp diverge: some are at {}, others at {}", place(a), place(b)));
}

// Nobody can run: legal only if all threads stand at the same barrier.
void Block::pass_barrier() {
  running_ = 0;
  for (const std::vector<Meeting>& meetings : meetings_) check_meetings(meetings);
  for (const Thread& t : threads_)
    if (t.state != State::at_barrier) fault(fmt::format("divergent barrier: of {} threads {}", threads_.size(), stuck()));
  for (const Thread& t : threads_)
    if (!(t.site == threads_[0].site)) fault(fmt::format("divergent barrier: some threads wait at {}, others at {}", name(threads_[0].site), name(t.site)));
  ++epoch_;
  for (Thread& t : threads_) t.state = State::ready;
}

void Block::sync_block(Site site) {
  me().state = State::at_barrier;
  me().site = site;
  yield();
}

void Block::collective(const char* what, Site site, uint32_t mask, void* mine, Compute compute) {
  const int lane = running_ % 32, first = running_ - lane;
  if ((mask >> lane & 1u) == 0) fault(fmt::format("{} at {}: lane {} is not in its own mask {:#010x}", what, name(site), lane, mask));
  std::vector<Meeting>& meetings = meetings_[static_cast<size_t>(running_ / 32)];
  auto m = std::find_if(meetings.begin(), meetings.end(), [&](const Meeting& x) { return x.mask == mask && x.site == site && std::strcmp(x.what, what) == 0; });
  if (m == meetings.end()) m = meetings.insert(meetings.end(), Meeting{what, site, mask});
  m->arrived |= 1u << lane;
  m->lanes[lane] = mine;
  if (m->arrived != mask) {
    me().state = State::at_collective;
    me().site = site;
    yield();
    return;
  }
  const Meeting whole = *m;
  meetings.erase(m);
  for (int l = 0; l < 32; ++l)
    if ((mask >> l & 1u) != 0) threads_[static_cast<size_t>(first + l)].state = State::ready;
  compute(*this, whole.lanes, mask);
}

void Block::sync_warp(Site site) {
  collective("sync_warp", site, 0xffffffffu, nullptr, [](Block& b, void* const*, uint32_t) {
    const int first = b.running_ / 32 * 32;
    for (int l = 0; l < 32; ++l) ++b.threads_[static_cast<size_t>(first + l)].warp_epoch;
  });
}

// ---- shared memory ---------------------------------------------------------------------------------------------------------

void Block::check_shared(int64_t offset, int64_t bytes, int64_t align, const char* verb) const {
  if (offset < 0 || offset + bytes > launch_.shared_bytes)
    fault(fmt::format("{} of shared bytes [{}, +{}), but the launch asked for {}", verb, offset, bytes, launch_.shared_bytes));
  if (offset % align != 0) fault(fmt::format("misaligned {} of {} shared bytes at {}", verb, bytes, offset));
}

const char* Block::read_shared(int64_t offset, int64_t bytes, int64_t align) {
  check_shared(offset, bytes, align, "read");
  const auto self = static_cast<int16_t>(running_), my_warp = static_cast<int16_t>(running_ / 32);
  const uint32_t warp_epoch = me().warp_epoch;
  for (int64_t i = offset; i < offset + bytes; ++i) {
    Byte& b = bytes_[static_cast<size_t>(i)];
    if (b.state == Byte::never_written) fault(fmt::format("read of shared byte {}, which nobody has written", i));
    if (b.state == Byte::in_flight) fault(fmt::format("read of shared byte {} while an asynchronous copy to it was not waited for", i));
    if (b.writer != self && b.write_epoch == epoch_ && !(b.writer / 32 == my_warp && b.write_warp_epoch < warp_epoch))
      fault(fmt::format("race: shared byte {} was written by thread {} with no barrier before this read", i, b.writer));
    if (b.read_epoch != epoch_ || b.reader == -1) {
      b.reader = self, b.reader_warp = my_warp, b.read_epoch = epoch_, b.read_warp_epoch = warp_epoch;
    } else {
      if (b.reader != self) b.reader = -2;
      if (b.reader_warp != my_warp) b.reader_warp = -2;
      b.read_warp_epoch = std::max(b.read_warp_epoch, warp_epoch);
    }
  }
  return shared_.data() + offset;
}

void Block::check_write(Byte& b, int64_t offset) {
  const int my_warp = running_ / 32;
  const uint32_t warp_epoch = me().warp_epoch;
  if (b.state == Byte::in_flight) fault(fmt::format("write of shared byte {} while an asynchronous copy to it was not waited for", offset));
  if (b.state == Byte::written && b.writer != running_ && b.write_epoch == epoch_ && !(b.writer / 32 == my_warp && b.write_warp_epoch < warp_epoch))
    fault(fmt::format("race: shared byte {} was written by thread {} with no barrier before this write", offset, b.writer));
  if (b.reader != -1 && b.read_epoch == epoch_ && b.reader != running_ && !(b.reader_warp == my_warp && b.read_warp_epoch < warp_epoch))
    fault(b.reader == -2 ? fmt::format("race: shared byte {} was read by other threads with no barrier before this write", offset)
                         : fmt::format("race: shared byte {} was read by thread {} with no barrier before this write", offset, b.reader));
  b.writer = static_cast<int16_t>(running_), b.write_epoch = epoch_, b.write_warp_epoch = warp_epoch;
  b.reader = -1;
}

char* Block::write_shared(int64_t offset, int64_t bytes, int64_t align) {
  check_shared(offset, bytes, align, "write");
  for (int64_t i = offset; i < offset + bytes; ++i) {
    check_write(bytes_[static_cast<size_t>(i)], i);
    bytes_[static_cast<size_t>(i)].state = Byte::written;
  }
  return shared_.data() + offset;
}

void Block::cp_async(int64_t offset, const void* from, int64_t bytes, bool valid) {
  check_shared(offset, bytes, bytes, "asynchronous copy");
  if (valid) check_global(from, bytes, bytes, false);
  for (int64_t i = offset; i < offset + bytes; ++i) {
    check_write(bytes_[static_cast<size_t>(i)], i);
    bytes_[static_cast<size_t>(i)].state = Byte::in_flight;
  }
  std::memset(shared_.data() + offset, 0xff, static_cast<size_t>(bytes));
  me().copies.push_back({offset, bytes, valid ? static_cast<const char*>(from) : nullptr, me().groups});
}

void Block::cp_async_commit() { ++me().groups; }

// As late as allowed: the bytes arrive when they are waited for.
void Block::cp_async_wait(int pending) {
  Thread& t = me();
  std::erase_if(t.copies, [&](const AsyncCopy& c) {
    if (c.group >= t.groups - pending) return false;
    if (c.from != nullptr) {
      check_global(c.from, c.bytes, c.bytes, false);
      std::memcpy(shared_.data() + c.offset, c.from, static_cast<size_t>(c.bytes));
    } else {
      std::memset(shared_.data() + c.offset, 0, static_cast<size_t>(c.bytes));
    }
    for (int64_t i = c.offset; i < c.offset + c.bytes; ++i) {
      Byte& b = bytes_[static_cast<size_t>(i)];
      b.state = Byte::written;
      b.writer = static_cast<int16_t>(running_), b.write_epoch = epoch_, b.write_warp_epoch = t.warp_epoch;
    }
    return true;
  });
}

}  // namespace dspark::emulation
