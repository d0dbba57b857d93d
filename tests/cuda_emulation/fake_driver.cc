#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "cuda_emulation/block.h"
#include "cuda_emulation/fakes.h"
#include "cuda_emulation/memory.h"
#include "cuda_emulation/streams.h"

namespace dspark::emulation {

int64_t live_blas_objects();
int64_t live_communicators();

namespace {

struct Machine {
  int devices = 1, major = 9, minor = 0, version = 13000;
  bool started = false;
  void* context = nullptr;
  int retained = 0;
  std::set<void*> streams, events, timed;
  std::map<char*, size_t> pinned;
  std::map<void*, std::vector<std::function<void()>>> graphs, executables;
};
Machine& machine() {
  static Machine m;
  return m;
}

int64_t launches = 0;

void require(bool ok, const std::string& message) {
  if (!ok) throw Fault("driver: " + message);
}
void in_context() { require(machine().context != nullptr, "a call before cuCtxSetCurrent"); }
// What the driver refuses while a stream is captured, or would leave out of the graph.
void not_captured(const char* what) { require(!capturing(), fmt::format("{} while a graph is captured", what)); }
StreamState* stream_of(void* s) {
  in_context();
  require(machine().streams.count(s) > 0, "a stream that was not made, or is gone");
  return static_cast<StreamState*>(s);
}
EventState* event_of(void* e) {
  require(machine().events.count(e) > 0, "an event that was not made, or is gone");
  return static_cast<EventState*>(e);
}

int init(unsigned flags) {
  require(flags == 0, "cuInit wants 0");
  machine().started = true;
  return cuda::kSuccess;
}
int version(int* v) {
  *v = machine().version;
  return cuda::kSuccess;
}
int device_count(int* n) {
  require(machine().started, "a call before cuInit");
  *n = machine().devices;
  return cuda::kSuccess;
}
int device_get(int* device, int ordinal) {
  require(ordinal >= 0 && ordinal < machine().devices, fmt::format("device {} of {}", ordinal, machine().devices));
  *device = ordinal;
  return cuda::kSuccess;
}
int device_name(char* name, int bytes, int) {
  std::snprintf(name, static_cast<size_t>(bytes), "emulated GPU");
  return cuda::kSuccess;
}
int device_attribute(int* value, int attribute, int) {
  require(attribute == cuda::kComputeMajor || attribute == cuda::kComputeMinor, fmt::format("attribute {}", attribute));
  *value = attribute == cuda::kComputeMajor ? machine().major : machine().minor;
  return cuda::kSuccess;
}
int total_memory(size_t* bytes, int) {
  *bytes = size_t{1} << 30;
  return cuda::kSuccess;
}
int retain(void** context, int) {
  ++machine().retained;
  *context = &machine();
  return cuda::kSuccess;
}
int release(int) {
  require(machine().retained > 0, "the primary context is released more often than retained");
  if (--machine().retained == 0) machine().context = nullptr;
  return cuda::kSuccess;
}
int set_current(void* context) {
  require(context == &machine() && machine().retained > 0, "a context that was not retained");
  machine().context = context;
  return cuda::kSuccess;
}
int allocate(cuda::DevicePointer* p, size_t bytes) {
  not_captured("cuMemAlloc");
  in_context();
  require(bytes > 0, "cuMemAlloc of 0 bytes");
  if (bytes > size_t{1} << 40) return 2;
  *p = reinterpret_cast<cuda::DevicePointer>(allocate_global(static_cast<int64_t>(bytes)));
  return cuda::kSuccess;
}
int free_memory(cuda::DevicePointer p) {
  not_captured("cuMemFree");
  in_context();
  synchronize_all();  // cuMemFree waits for the device
  free_global(reinterpret_cast<void*>(p));
  return cuda::kSuccess;
}
int host_allocate(void** p, size_t bytes, unsigned) {
  not_captured("cuMemHostAlloc");
  char* memory = new char[bytes];
  std::memset(memory, 0xff, bytes);
  machine().pinned[memory] = bytes;
  *p = memory;
  return cuda::kSuccess;
}
int host_free(void* p) {
  not_captured("cuMemFreeHost");
  const auto it = machine().pinned.find(static_cast<char*>(p));
  require(it != machine().pinned.end(), "cuMemFreeHost of memory that is not pinned");
  machine().pinned.erase(it);
  delete[] static_cast<char*>(p);
  return cuda::kSuccess;
}

struct Side {
  char* p;
  size_t pitch;
};
Side side(unsigned type, const void* host, cuda::DevicePointer device, size_t x, size_t y, size_t pitch) {
  require(type == cuda::kHostMemory || type == cuda::kDeviceMemory, fmt::format("memory type {}", type));
  char* base = type == cuda::kHostMemory ? static_cast<char*>(const_cast<void*>(host)) : reinterpret_cast<char*>(device);
  require(base != nullptr, "a copy through a null pointer");
  return {base + y * pitch + x, pitch};
}

// Reads and writes host memory as late as the stream comes to it.
int copy_2d(const cuda::Copy2D* c, void* stream) {
  not_captured("a copy");
  require(c->width_bytes > 0 && c->height > 0, "an empty copy");
  require(c->src_array == nullptr && c->dst_array == nullptr, "a copy of an array");
  require(c->src_pitch >= c->width_bytes && c->dst_pitch >= c->width_bytes, fmt::format("a copy of rows of {} bytes with pitches {} and {}", c->width_bytes, c->src_pitch, c->dst_pitch));
  require(c->src_type != c->dst_type, "a copy that stays on one side");
  enqueue(stream_of(stream), [c = *c] {
    const Side from = side(c.src_type, c.src_host, c.src_device, c.src_x, c.src_y, c.src_pitch);
    const Side to = side(c.dst_type, c.dst_host, c.dst_device, c.dst_x, c.dst_y, c.dst_pitch);
    for (size_t r = 0; r < c.height; ++r) {
      const auto bytes = static_cast<int64_t>(c.width_bytes);
      if (c.src_type == cuda::kDeviceMemory) check_global(from.p + r * from.pitch, bytes, 1, false);
      if (c.dst_type == cuda::kDeviceMemory) check_global(to.p + r * to.pitch, bytes, 1, true);
      std::memcpy(to.p + r * to.pitch, from.p + r * from.pitch, c.width_bytes);
    }
  });
  return cuda::kSuccess;
}

int stream_create(void** s, unsigned flags) {
  in_context();
  require(flags == cuda::kStreamNonBlocking, "a stream that waits for the default stream");
  *s = create_stream();
  machine().streams.insert(*s);
  return cuda::kSuccess;
}
int stream_destroy(void* s) {
  destroy_stream(stream_of(s));
  machine().streams.erase(s);
  return cuda::kSuccess;
}
int stream_synchronize(void* s) {
  not_captured("cuStreamSynchronize");
  synchronize(stream_of(s));
  return cuda::kSuccess;
}
int stream_wait(void* s, void* e, unsigned flags) {
  not_captured("cuStreamWaitEvent");
  require(flags == 0, "cuStreamWaitEvent wants 0");
  wait(stream_of(s), event_of(e));
  return cuda::kSuccess;
}
int event_create(void** e, unsigned flags) {
  require(flags == cuda::kEventDisableTiming || flags == 0, fmt::format("an event with flags {}", flags));
  *e = create_event();
  machine().events.insert(*e);
  if (flags == 0) machine().timed.insert(*e);
  return cuda::kSuccess;
}
int event_destroy(void* e) {
  destroy_event(event_of(e));
  machine().events.erase(e);
  machine().timed.erase(e);
  return cuda::kSuccess;
}
int event_record(void* e, void* s) {
  not_captured("cuEventRecord");
  record(stream_of(s), event_of(e));
  return cuda::kSuccess;
}
int event_query(void* e) {
  not_captured("cuEventQuery");
  return query(event_of(e)) ? cuda::kSuccess : cuda::kNotReady;
}
int event_synchronize(void* e) {
  not_captured("cuEventSynchronize");
  synchronize(event_of(e));
  return cuda::kSuccess;
}
int event_elapsed(float* ms, void* from, void* to) {
  for (void* e : {from, to}) require(happened(event_of(e)) && machine().timed.count(e) > 0, "the time of an event that does not take it, or has not happened");
  *ms = static_cast<float>(time_of(event_of(to)) - time_of(event_of(from)));
  return cuda::kSuccess;
}
int host_function(void* s, void (*function)(void*), void* user) {
  not_captured("cuLaunchHostFunc");
  enqueue(stream_of(s), [=] { function(user); });
  return cuda::kSuccess;
}

int capture_begin(void* s, int mode) {
  require(mode == cuda::kCaptureThreadLocal, fmt::format("a capture of mode {}", mode));
  begin_capture(stream_of(s));
  return cuda::kSuccess;
}
int capture_end(void* s, void** graph) {
  auto* key = new char;
  machine().graphs[key] = end_capture(stream_of(s));
  *graph = key;
  return cuda::kSuccess;
}
template <typename Map>
int destroy_graph(Map& map, void* graph, const char* what) {
  require(map.erase(graph) > 0, fmt::format("destroying {} that was not made", what));
  delete static_cast<char*>(graph);
  return cuda::kSuccess;
}
int graph_destroy(void* graph) { return destroy_graph(machine().graphs, graph, "a graph"); }
int executable_destroy(void* executable) { return destroy_graph(machine().executables, executable, "an executable graph"); }
int graph_instantiate(void** executable, void* graph, unsigned long long flags) {
  not_captured("cuGraphInstantiate");
  require(flags == 0 && machine().graphs.count(graph) > 0, "instantiating a graph that was not made");
  require(!machine().graphs[graph].empty(), "an empty graph");
  auto* key = new char;
  machine().executables[key] = machine().graphs[graph];
  *executable = key;
  return cuda::kSuccess;
}
int graph_launch(void* executable, void* s) {
  not_captured("cuGraphLaunch");
  require(machine().executables.count(executable) > 0, "launching a graph that is not ready, or is gone");
  ++launches;
  enqueue(stream_of(s), [work = machine().executables[executable]] {
    for (const auto& w : work) w();
  });
  return cuda::kSuccess;
}
int error_string(int error, const char** text) {
  *text = error == 2 ? "out of memory" : "an error of the fake driver";
  return cuda::kSuccess;
}

}  // namespace

const cuda::Driver& fake_driver() {
  static const cuda::Driver driver = [] {
    cuda::Driver d;
    d.cuInit = init, d.cuDriverGetVersion = version, d.cuDeviceGetCount = device_count, d.cuDeviceGet = device_get, d.cuDeviceGetName = device_name;
    d.cuDeviceGetAttribute = device_attribute, d.cuDeviceTotalMem_v2 = total_memory, d.cuDevicePrimaryCtxRetain = retain, d.cuDevicePrimaryCtxRelease_v2 = release;
    d.cuCtxSetCurrent = set_current, d.cuMemAlloc_v2 = allocate, d.cuMemFree_v2 = free_memory, d.cuMemHostAlloc = host_allocate, d.cuMemFreeHost = host_free;
    d.cuMemcpy2DAsync_v2 = copy_2d, d.cuStreamCreate = stream_create, d.cuStreamDestroy_v2 = stream_destroy, d.cuStreamSynchronize = stream_synchronize;
    d.cuStreamWaitEvent = stream_wait, d.cuEventCreate = event_create, d.cuEventDestroy_v2 = event_destroy, d.cuEventRecord = event_record, d.cuEventQuery = event_query;
    d.cuEventSynchronize = event_synchronize, d.cuEventElapsedTime_v2 = event_elapsed, d.cuLaunchHostFunc = host_function, d.cuGetErrorString = error_string;
    d.cuStreamBeginCapture_v2 = capture_begin, d.cuStreamEndCapture = capture_end, d.cuGraphInstantiateWithFlags = graph_instantiate, d.cuGraphLaunch = graph_launch;
    d.cuGraphExecDestroy = executable_destroy, d.cuGraphDestroy = graph_destroy;
    return d;
  }();
  return driver;
}

int64_t live_objects() {
  const Machine& m = machine();
  return static_cast<int64_t>(m.streams.size() + m.events.size() + m.pinned.size() + m.graphs.size() + m.executables.size()) + m.retained + live_blas_objects() + live_communicators();
}

void set_devices(int count, int major, int minor) { machine().devices = count, machine().major = major, machine().minor = minor; }

int64_t graph_launches() { return launches; }

void set_driver_version(int version) { machine().version = version; }

}  // namespace dspark::emulation
