// Emulated streams and events. Work runs as late as it may: when the host waits for it, or at random before; among streams in any
// order that events allow.
//
// Several ranks, a thread each, may share the emulated machine: one of them at a time. Whenever one can only wait, it gives way.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace dspark::emulation {

struct StreamState;
struct EventState;

StreamState* create_stream();
void destroy_stream(StreamState* s);  // a Fault while work waits in it
EventState* create_event();
void destroy_event(EventState* e);

void enqueue(StreamState* s, std::function<void()> work);
// Work that can begin only when ready() says so, which is asked when the stream has come to it.
void enqueue_when(StreamState* s, std::function<bool()> ready, std::function<void()> work);
// Capture: between the two, what is enqueued is not run but kept. Only kernels may be: no event, no wait for the stream.
void begin_capture(StreamState* s);
std::vector<std::function<void()>> end_capture(StreamState* s);
bool capturing();  // on any stream
void record(StreamState* s, EventState* e);
void wait(StreamState* s, EventState* e);  // for the event's last record before this call
bool happened(EventState* e);              // of its last record; runs nothing
void synchronize(EventState* e);
void synchronize(StreamState* s);
void synchronize_all();

// The device's clock, which only runs when work says so: what two events were apart.
void pass_time(double ms);
double time_of(EventState* e);  // of its last record that has happened

// What a rank does that can only wait: lets the others run. Empty: there are none, and waiting in vain is a Fault.
void set_give_way(std::function<void()> give_way);
void give_way();
// Whether the event has happened; with other ranks, work goes on meanwhile.
bool query(EventState* e);

}  // namespace dspark::emulation
