#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "core/dtype.h"
#include "cuda_emulation/block.h"
#include "cuda_emulation/fakes.h"
#include "cuda_emulation/memory.h"
#include "cuda_emulation/streams.h"

namespace dspark::emulation {
namespace {

constexpr int kRemoteError = 6;

struct Call {
  std::string what;  // the same on all ranks
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  int type = 0, root = -1;  // -1: all of them get the sum
  bool is_sum = false;
};

// One grouped call of all ranks.
struct Meeting {
  std::vector<std::vector<Call>> of_rank;
  std::vector<bool> called, arrived;
  bool done = false;
};

struct World {
  int ranks = 0;
  std::vector<bool> joined;
  std::map<size_t, Meeting> meetings;  // by number of the call
};

struct Communicator {
  std::shared_ptr<World> world;
  int rank = 0;
  size_t calls = 0;
  int64_t waiting = 0;  // calls in its stream that have not happened
  void* stream = nullptr;
  bool aborted = false, finalized = false;
  int error = cuda::kNcclSuccess;
};

struct State {
  int version = 22800;
  uint64_t next_id = 1;
  std::map<uint64_t, std::shared_ptr<World>> worlds;
  std::map<void*, std::shared_ptr<Communicator>> communicators;
  std::set<int> failing;
};
State& state() {
  static State s;
  return s;
}

// Of this rank's thread.
thread_local int t_depth = 0;
thread_local std::vector<std::pair<void*, Call>> t_grouped;

void require(bool ok, const std::string& message) {
  if (!ok) throw Fault("NCCL: " + message);
}
std::shared_ptr<Communicator> find(void* comm) {
  const auto it = state().communicators.find(comm);
  require(it != state().communicators.end(), "a communicator that was not made, or is gone");
  return it->second;
}

int64_t bytes_of(int type) {
  require(type == cuda::kNcclFloat32 || type == cuda::kNcclFloat64 || type == cuda::kNcclBfloat16, fmt::format("type {}", type));
  return type == cuda::kNcclFloat64 ? 8 : type == cuda::kNcclFloat32 ? 4 : 2;
}
double read(const void* p, size_t i, int type) {
  if (type == cuda::kNcclFloat64) return static_cast<const double*>(p)[i];
  return type == cuda::kNcclFloat32 ? static_cast<const float*>(p)[i] : to_float(static_cast<const bf16*>(p)[i]);
}
void write(void* p, size_t i, int type, double v) {
  if (type == cuda::kNcclFloat64) static_cast<double*>(p)[i] = v;
  else if (type == cuda::kNcclFloat32) static_cast<float*>(p)[i] = static_cast<float>(v);
  else static_cast<bf16*>(p)[i] = to_bf16(static_cast<float>(v));
}

// Every rank's stream stands at this meeting: nobody else touches what it reads and writes.
void perform(const Meeting& m) {
  for (size_t i = 0; i < m.of_rank[0].size(); ++i) {
    const Call& first = m.of_rank[0][i];
    const int64_t bytes = static_cast<int64_t>(first.count) * bytes_of(first.type);
    for (size_t r = 0; r < m.of_rank.size(); ++r) {
      const Call& c = m.of_rank[r][i];
      if (first.is_sum || first.root == static_cast<int>(r)) check_global(c.send, bytes, bytes_of(first.type), false);
      if (first.root < 0 || !first.is_sum || first.root == static_cast<int>(r)) check_global(c.receive, bytes, bytes_of(first.type), true);
    }
    std::vector<double> result(first.count);
    for (size_t k = 0; k < first.count; ++k) {
      if (!first.is_sum) {
        result[k] = read(m.of_rank[static_cast<size_t>(first.root)][i].send, k, first.type);
        continue;
      }
      for (const auto& calls : m.of_rank) result[k] += read(calls[i].send, k, first.type);
    }
    for (size_t r = 0; r < m.of_rank.size(); ++r)
      if (first.root < 0 || !first.is_sum || first.root == static_cast<int>(r))
        for (size_t k = 0; k < first.count; ++k) write(m.of_rank[r][i].receive, k, first.type, result[k]);
  }
}

void enqueue_calls(const std::shared_ptr<Communicator>& c, std::vector<Call> calls) {
  const std::shared_ptr<World> world = c->world;
  const size_t number = c->calls++;
  Meeting& m = world->meetings[number];
  const auto n = static_cast<size_t>(world->ranks), rank = static_cast<size_t>(c->rank);
  m.of_rank.resize(n), m.called.resize(n, false), m.arrived.resize(n, false);
  m.of_rank[rank] = std::move(calls), m.called[rank] = true;
  for (size_t r = 0; r < n; ++r) {
    if (!m.called[r]) continue;
    const auto text = [&](size_t of) {
      std::string all;
      for (const Call& call : m.of_rank[of]) all += call.what + "; ";
      return all;
    };
    require(text(r) == text(rank), fmt::format("call {}: rank {} calls [{}], rank {} [{}]", number, rank, text(rank), r, text(r)));
  }
  ++c->waiting;
  enqueue_when(
      static_cast<StreamState*>(c->stream),
      [c, world, number, rank] {
        Meeting& here = world->meetings.at(number);
        here.arrived[rank] = true;
        return c->aborted || here.done || std::find(here.arrived.begin(), here.arrived.end(), false) == here.arrived.end();
      },
      [c, world, number] {
        Meeting& here = world->meetings.at(number);
        --c->waiting;
        if (c->aborted || here.done) return;
        perform(here);
        here.done = true;
      });
}

int add(void* comm, void* stream, Call call) {
  const auto c = find(comm);
  require(!c->aborted && !c->finalized, "a call on a communicator that was ended");
  require(std::find(c->world->joined.begin(), c->world->joined.end(), false) == c->world->joined.end(), "a call before all ranks have joined");
  require(call.count > 0, "an empty collective");
  require(stream != nullptr && (c->stream == nullptr || c->stream == stream), "calls on two streams");
  require(call.root < c->world->ranks, fmt::format("root {} of {}", call.root, c->world->ranks));
  c->stream = stream;
  require(t_depth > 0, "a collective outside a group");
  t_grouped.emplace_back(comm, std::move(call));
  return random_below(2) == 0 ? cuda::kNcclSuccess : cuda::kNcclInProgress;
}

int get_version(int* v) {
  *v = state().version;
  return cuda::kNcclSuccess;
}
int get_id(cuda::NcclId* id) {
  const uint64_t n = state().next_id++;
  state().worlds[n] = std::make_shared<World>();
  std::memcpy(id->bytes + 100, &n, sizeof n);  // all of it must travel
  return cuda::kNcclSuccess;
}
int init(void** comm, int ranks, cuda::NcclId id, int rank, cuda::NcclConfig* config) {
  uint64_t n = 0;
  std::memcpy(&n, id.bytes + 100, sizeof n);
  require(state().worlds.count(n) == 1, "an id that nobody made");
  require(config->size == 24 && config->magic == 0xcafebeef && config->blocking == 0, "another configuration than expected");
  const auto world = state().worlds[n];
  if (world->joined.empty()) world->ranks = ranks, world->joined.resize(static_cast<size_t>(ranks), false);
  require(world->ranks == ranks && rank >= 0 && rank < ranks && !world->joined[static_cast<size_t>(rank)], fmt::format("rank {} of {} joins a world of {}, or joins twice", rank, ranks, world->ranks));
  world->joined[static_cast<size_t>(rank)] = true;
  const auto c = std::make_shared<Communicator>();
  c->world = world, c->rank = rank;
  *comm = c.get();
  state().communicators[c.get()] = c;
  return cuda::kNcclInProgress;
}
int async_error(void* comm, int* error) {
  const auto c = find(comm);
  if (state().failing.count(c->rank) > 0) c->error = kRemoteError;
  const bool complete = std::find(c->world->joined.begin(), c->world->joined.end(), false) == c->world->joined.end();
  if (!complete) give_way();
  *error = c->error != cuda::kNcclSuccess ? c->error : complete ? cuda::kNcclSuccess : cuda::kNcclInProgress;
  return cuda::kNcclSuccess;
}
int finalize(void* comm) {
  const auto c = find(comm);
  require(c->waiting == 0, "a communicator is finished while its work waits");
  c->finalized = true;
  return cuda::kNcclInProgress;
}
int destroy(void* comm) {
  require(find(comm)->finalized, "a communicator is destroyed that was not finished");
  state().communicators.erase(comm);
  return cuda::kNcclSuccess;
}
int abort(void* comm) {
  find(comm)->aborted = true;
  state().communicators.erase(comm);
  return cuda::kNcclSuccess;
}
int group_start() {
  ++t_depth;
  return cuda::kNcclSuccess;
}
int group_end() {
  require(t_depth > 0, "the end of a group without its start");
  if (--t_depth > 0) return cuda::kNcclSuccess;
  std::map<void*, std::vector<Call>> of;
  for (auto& [comm, call] : t_grouped) of[comm].push_back(std::move(call));
  t_grouped.clear();
  for (auto& [comm, calls] : of) enqueue_calls(find(comm), std::move(calls));
  return random_below(2) == 0 ? cuda::kNcclSuccess : cuda::kNcclInProgress;
}
int reduce(const void* send, void* receive, size_t count, int type, int op, int root, void* comm, void* stream) {
  require(op == cuda::kNcclSum && root >= 0, "a reduction that is no sum, or has no root");
  return add(comm, stream, {fmt::format("reduce {} of {} to {}", count, type, root), send, receive, count, type, root, true});
}
int broadcast(const void* send, void* receive, size_t count, int type, int root, void* comm, void* stream) {
  require(root >= 0, "a broadcast without a root");
  return add(comm, stream, {fmt::format("broadcast {} of {} from {}", count, type, root), send, receive, count, type, root, false});
}
int all_reduce(const void* send, void* receive, size_t count, int type, int op, void* comm, void* stream) {
  require(op == cuda::kNcclSum, "a reduction that is no sum");
  return add(comm, stream, {fmt::format("all-reduce {} of {}", count, type), send, receive, count, type, -1, true});
}
const char* error_string(int error) { return error == kRemoteError ? "remote process exited or there was a network error" : "an error of the fake NCCL"; }
const char* last_error(void*) { return ""; }

}  // namespace

const cuda::Nccl& fake_nccl() {
  static const cuda::Nccl nccl = [] {
    cuda::Nccl n;
    n.ncclGetVersion = get_version, n.ncclGetUniqueId = get_id, n.ncclCommInitRankConfig = init, n.ncclCommGetAsyncError = async_error;
    n.ncclCommFinalize = finalize, n.ncclCommDestroy = destroy, n.ncclCommAbort = abort, n.ncclGroupStart = group_start, n.ncclGroupEnd = group_end;
    n.ncclReduce = reduce, n.ncclBroadcast = broadcast, n.ncclAllReduce = all_reduce, n.ncclGetErrorString = error_string, n.ncclGetLastError = last_error;
    return n;
  }();
  return nccl;
}

int64_t live_communicators() { return static_cast<int64_t>(state().communicators.size()); }
void set_nccl_version(int version) { state().version = version; }
void fail_nccl(int rank) {
  if (rank < 0) state().failing.clear();
  else state().failing.insert(rank);
}

}  // namespace dspark::emulation
