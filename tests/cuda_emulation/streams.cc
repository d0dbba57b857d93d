#include "cuda_emulation/streams.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "core/log.h"
#include "cuda_emulation/block.h"

namespace dspark::emulation {

struct EventState {
  uint64_t recorded = 0, done = 0;  // numbers of records
  double time = 0;                  // of the last one done
};

struct StreamState {
  struct Item {
    std::function<void()> work;         // empty: waits for, or completes, an event
    EventState* event = nullptr;
    uint64_t number = 0;
    bool is_wait = false;
    std::function<bool()> ready;        // of `work`; empty: always
  };
  std::deque<Item> items;
  bool capture = false;
  std::vector<std::function<void()>> captured;
};

namespace {

std::vector<std::unique_ptr<StreamState>>& streams() {
  static std::vector<std::unique_ptr<StreamState>> all;
  return all;
}

constexpr double kHopeless = 600;  // seconds, on a loaded machine too

double& device_clock() {
  static double ms = 0;
  return ms;
}

bool runnable(const StreamState& s) {
  if (s.items.empty()) return false;
  const StreamState::Item& i = s.items.front();
  return i.is_wait ? i.event->done >= i.number : !i.ready || i.ready();
}

std::function<void()>& other_ranks() {
  static std::function<void()> f;
  return f;
}

// After a fault nothing that waits happens any more: what it would write to may be gone by then.
void abandon() {
  for (const auto& s : streams()) {
    for (const StreamState::Item& i : s->items)
      if (i.event != nullptr && !i.is_wait) i.event->done = std::max(i.event->done, i.number);
    s->items.clear();
  }
}

// One item of a random stream that can go on; false when none can.
bool step() {
  std::vector<StreamState*> ready;
  for (const auto& s : streams())
    if (runnable(*s)) ready.push_back(s.get());
  if (ready.empty()) return false;
  StreamState& s = *ready[random_below(ready.size())];
  const StreamState::Item item = std::move(s.items.front());
  s.items.pop_front();
  try {
    if (item.work) item.work();
  } catch (...) {
    abandon();
    throw;
  }
  if (item.event != nullptr && !item.is_wait) item.event->done = std::max(item.event->done, item.number), item.event->time = device_clock();
  return true;
}

template <typename Done>
void run_until(const Done& done, const char* what) {
  const double start = now_s();
  while (!done()) {
    if (step()) continue;
    if (!other_ranks() || now_s() - start > kHopeless) {
      abandon();
      throw Fault(std::string(what) + " waits for something that never happens");
    }
    give_way();
  }
}

void sometimes() {
  while (random_below(4) == 0 && step()) {
  }
}

}  // namespace

StreamState* create_stream() {
  streams().push_back(std::make_unique<StreamState>());
  return streams().back().get();
}

void destroy_stream(StreamState* s) {
  if (!s->items.empty()) throw Fault("a stream is destroyed while work waits in it");
  std::erase_if(streams(), [&](const auto& p) { return p.get() == s; });
}

EventState* create_event() { return new EventState; }
void destroy_event(EventState* e) {
  for (const auto& s : streams())
    for (const StreamState::Item& i : s->items)
      if (i.event == e) throw Fault("an event is destroyed while a stream has yet to reach it");
  delete e;
}

void enqueue(StreamState* s, std::function<void()> work) { enqueue_when(s, {}, std::move(work)); }

void enqueue_when(StreamState* s, std::function<bool()> ready, std::function<void()> work) {
  if (std::none_of(streams().begin(), streams().end(), [&](const auto& p) { return p.get() == s; })) throw Fault("work for a stream that does not exist");
  if (s->capture) {
    if (ready) throw Fault("work that waits for others is captured");
    return s->captured.push_back(std::move(work));
  }
  s->items.push_back({std::move(work), nullptr, 0, false, std::move(ready)});
  sometimes();
}

void begin_capture(StreamState* s) {
  if (capturing()) throw Fault("a capture begins inside another");
  s->capture = true;
}
std::vector<std::function<void()>> end_capture(StreamState* s) {
  if (!s->capture) throw Fault("a capture ends that was not begun");
  s->capture = false;
  return std::exchange(s->captured, {});
}
bool capturing() {
  return std::any_of(streams().begin(), streams().end(), [](const auto& s) { return s->capture; });
}

void record(StreamState* s, EventState* e) {
  s->items.push_back({{}, e, ++e->recorded, false});
  sometimes();
}

void wait(StreamState* s, EventState* e) { s->items.push_back({{}, e, e->recorded, true}); }

bool happened(EventState* e) { return e->done >= e->recorded; }

void synchronize(EventState* e) {
  run_until([&] { return happened(e); }, "an event");
}
void synchronize(StreamState* s) {
  run_until([&] { return s->items.empty(); }, "a stream");
}
void pass_time(double ms) { device_clock() += ms; }
double time_of(EventState* e) { return e->time; }

void synchronize_all() {
  run_until([] { return std::all_of(streams().begin(), streams().end(), [](const auto& s) { return s->items.empty(); }); }, "the device");
}


void set_give_way(std::function<void()> f) { other_ranks() = std::move(f); }
void give_way() {
  if (other_ranks()) other_ranks()();
}

bool query(EventState* e) {
  if (!happened(e) && other_ranks() && random_below(2) == 0 && !step()) give_way();
  return happened(e);
}
}  // namespace dspark::emulation
