#include "net/mesh.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/log.h"

namespace dspark::net {

struct Mesh::Header {
  static constexpr uint32_t kMagic = 0x4d505344;  // "DSPM"
  uint32_t magic = kMagic, call = 0;
  int64_t bytes = 0;
  char what[16] = {};
};

namespace {
constexpr const char* kAbort = "abort";
constexpr int64_t kMaxReason = 4096;
constexpr double kLinger = 2;  // seconds for the peers to take in why this rank ends

void name(char (&to)[16], const char* what) {
  DS_ASSERT(std::strlen(what) < sizeof to, "the name '{}' is too long", what);
  std::strncpy(to, what, sizeof to - 1);
}
}  // namespace

// One direction's part of an exchange, and the other's.
struct Mesh::Flow {
  Header out_header, in_header;
  std::span<const std::byte> out;  // of the part at hand, what is left
  std::span<std::byte> in;
  int64_t out_left = 0, in_left = 0;  // bytes after the part at hand
  bool header_came = false;
  bool sending() const { return !out.empty() || out_left > 0; }
  bool receiving() const { return !in.empty() || in_left > 0; }
};

Mesh::Mesh(int64_t rank, std::vector<int> sockets, double deadline_s)
    : rank_(rank), sockets_(std::move(sockets)), deadline_s_(deadline_s), open_frame_(sockets_.size(), false) {
  DS_ASSERT(rank >= 0 && rank < size() && sockets_[static_cast<size_t>(rank)] == -1 && deadline_s > 0, "rank {} of {}", rank, size());
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

Mesh::~Mesh() {
  for (const int fd : sockets_)
    if (fd >= 0) ::close(fd);
  if (wake_ >= 0) ::close(wake_);
}

void Mesh::interrupt() noexcept {
  interrupted_ = true;
  const uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
}

void Mesh::broken(const std::string& why) {
  broken_ = why;
  fail("{}", why);
}

int Mesh::wait(pollfd* polls, size_t n, double seconds) const {
  int result = 0;
  const auto poll = [&] { result = ::poll(polls, n, static_cast<int>(std::min(seconds * 1e3 + 1, 1e6))); };
  if (around_wait) around_wait(poll);
  else poll();
  return result;
}

std::string Mesh::said(int64_t peer) {
  std::string reason;
  char part[512];
  const double until = now_s() + kLinger;
  while (reason.size() < static_cast<size_t>(kMaxReason) && now_s() < until) {
    pollfd p{sockets_[static_cast<size_t>(peer)], POLLIN, 0};
    if (wait(&p, 1, 0.1) <= 0) continue;
    const auto n = ::recv(p.fd, part, sizeof part, MSG_DONTWAIT);
    if (n <= 0) break;
    reason.append(part, static_cast<size_t>(n));
  }
  return reason;
}

// The connection has ended. Its last words, if there are any, are the reason.
void Mesh::lost(int64_t peer, const char* what, bool at_header) {
  Header h;
  const auto n = at_header ? ::recv(sockets_[static_cast<size_t>(peer)], &h, sizeof h, MSG_DONTWAIT) : 0;
  if (n == sizeof h && h.magic == Header::kMagic && std::strncmp(h.what, kAbort, sizeof h.what) == 0) broken(fmt::format("rank {} ended the run: {}", peer, said(peer)));
  broken(fmt::format("rank {} is gone: its connection ended in '{}' (call {} of rank {}); it was killed, or its machine or network failed. The last checkpoint is whole", peer, what, calls_, rank_));
}

void Mesh::check_header(int64_t peer, const Header& h, int64_t bytes, const char* what) {
  if (h.magic == Header::kMagic && std::strncmp(h.what, kAbort, sizeof h.what) == 0) broken(fmt::format("rank {} ended the run: {}", peer, said(peer)));
  char wanted[16] = {};
  name(wanted, what);
  if (h.magic != Header::kMagic || h.call != calls_ || h.bytes != bytes || std::memcmp(h.what, wanted, sizeof wanted) != 0)
    broken(fmt::format("rank {} is at call {} ('{:.15s}', {} bytes), rank {} at call {} ('{}', {} bytes): the ranks do not run the same command on the same data, or not the same version", peer,
                       h.call, h.what, h.bytes, rank_, calls_, what, bytes));
}

void Mesh::send_some(int64_t peer, Flow& f, Exchange& x, const char* what) {
  while (f.sending()) {
    if (f.out.empty()) {
      f.out = x.next_out(peer);
      DS_ASSERT(!f.out.empty() && static_cast<int64_t>(f.out.size()) <= f.out_left, "a part of {} bytes of {} left", f.out.size(), f.out_left);
      f.out_left -= static_cast<int64_t>(f.out.size());
    }
    open_frame_[static_cast<size_t>(peer)] = true;
    const auto n = ::send(sockets_[static_cast<size_t>(peer)], f.out.data(), f.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (n < 0) lost(peer, what, !f.header_came);
    f.out = f.out.subspan(static_cast<size_t>(n));
  }
  open_frame_[static_cast<size_t>(peer)] = false;
}

void Mesh::receive_some(int64_t peer, Flow& f, Exchange& x, const char* what) {
  while (f.receiving()) {
    if (f.in.empty()) {
      f.in = x.next_in(peer);
      if (f.in.empty()) return;
      DS_ASSERT(static_cast<int64_t>(f.in.size()) <= f.in_left, "room for {} bytes of {} left", f.in.size(), f.in_left);
      f.in_left -= static_cast<int64_t>(f.in.size());
    }
    const auto n = ::recv(sockets_[static_cast<size_t>(peer)], f.in.data(), f.in.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (n <= 0) lost(peer, what, false);
    f.in = f.in.subspan(static_cast<size_t>(n));
    if (!f.in.empty()) continue;
    if (f.header_came) {
      x.came(peer);
    } else {
      check_header(peer, f.in_header, x.in_bytes(peer), what);
      f.header_came = true;
    }
  }
}

void Mesh::exchange(const char* what, Exchange& x) {
  if (!broken_.empty()) fail("{}", broken_);
  DS_ASSERT(!aborted_, "'{}' after abort", what);
  ++calls_;
  const auto n = static_cast<size_t>(size());
  std::vector<Flow> flows(n);
  for (size_t p = 0; p < n; ++p) {
    if (static_cast<int64_t>(p) == rank_) continue;
    Flow& f = flows[p];
    f.out_left = x.out_bytes(static_cast<int64_t>(p)), f.in_left = x.in_bytes(static_cast<int64_t>(p));
    f.out_header.call = calls_, f.out_header.bytes = f.out_left;
    name(f.out_header.what, what);
    if (f.out_left > 0) f.out = std::as_bytes(std::span(&f.out_header, 1));
    if (f.in_left > 0) f.in = std::as_writable_bytes(std::span(&f.in_header, 1));
  }
  std::vector<pollfd> polls;
  std::vector<int64_t> peers;  // of polls
  double quiet_since = now_s();
  for (;;) {
    // A part that waits for another peer's asks for nothing here; it is asked again after something came.
    bool again = true;
    while (again && !interrupted_) {
      again = false;
      for (size_t p = 0; p < n; ++p) {
        Flow& f = flows[p];
        const auto before = std::pair(f.out.size() + static_cast<size_t>(f.out_left), f.in.size() + static_cast<size_t>(f.in_left));
        if (f.sending()) send_some(static_cast<int64_t>(p), f, x, what);
        if (f.receiving()) receive_some(static_cast<int64_t>(p), f, x, what);
        again |= before != std::pair(f.out.size() + static_cast<size_t>(f.out_left), f.in.size() + static_cast<size_t>(f.in_left));
      }
      if (again) quiet_since = now_s();
    }
    if (interrupted_) broken(fmt::format("rank {} gave up '{}' (call {}): it ends", rank_, what, calls_));
    polls.clear(), peers.clear();
    std::string waiting;
    for (size_t p = 0; p < n; ++p) {
      const Flow& f = flows[p];
      // One that is only sent to says that it ends by its end of the connection.
      const auto events = static_cast<short>((f.sending() ? POLLOUT : 0) | (!f.in.empty() ? POLLIN : 0) | (f.sending() && !f.receiving() ? POLLRDHUP : 0));
      if (events == 0) continue;  // done, or its next part has no room yet: that comes with another peer's
      polls.push_back({sockets_[p], events, 0});
      peers.push_back(static_cast<int64_t>(p));
      waiting += fmt::format("{}{}", waiting.empty() ? "" : ", ", p);
    }
    if (polls.empty()) break;
    polls.push_back({wake_, POLLIN, 0});
    // The others wait for rank 0, and it for one that is late: it is the one to say so.
    const double deadline = rank_ == 0 ? deadline_s_ : deadline_s_ + std::min(0.1 * deadline_s_, kLinger), left = quiet_since + deadline - now_s();
    if (left <= 0)
      broken(fmt::format("rank {} waited {:g} s in '{}' (call {}) for rank{} {}: stopped, stuck or cut off. The last checkpoint is whole", rank_, deadline, what, calls_,
                         waiting.find(',') == std::string::npos ? "" : "s", waiting));
    if (wait(polls.data(), polls.size(), left) < 0 && errno != EINTR) fail("cannot wait for other ranks: {}", errno_text());
    for (size_t i = 0; i < peers.size(); ++i)
      if (polls[i].revents & POLLRDHUP) lost(peers[i], what, true);
  }
  DS_ASSERT(std::none_of(flows.begin(), flows.end(), [](const Flow& f) { return f.sending() || f.receiving(); }), "'{}' has no room for what comes", what);
}

namespace {

// Whole buffers to and from each peer.
class Whole final : public Exchange {
 public:
  explicit Whole(int64_t size) : out(static_cast<size_t>(size)), in(static_cast<size_t>(size)) {}
  std::vector<std::span<const std::byte>> out;
  std::vector<std::span<std::byte>> in;
  int64_t out_bytes(int64_t peer) const override { return static_cast<int64_t>(out[static_cast<size_t>(peer)].size()); }
  int64_t in_bytes(int64_t peer) const override { return static_cast<int64_t>(in[static_cast<size_t>(peer)].size()); }
  std::span<const std::byte> next_out(int64_t peer) override { return out[static_cast<size_t>(peer)]; }
  std::span<std::byte> next_in(int64_t peer) override { return in[static_cast<size_t>(peer)]; }
  void came(int64_t) override {}
};

}  // namespace

void Mesh::sum(const char* what, std::span<double> values) {
  if (size() == 1) return;
  // Through rank 0: two steps of latency, and one order of adding.
  std::vector<std::vector<double>> all(rank_ == 0 ? static_cast<size_t>(size()) : 0, std::vector<double>(values.size()));
  Whole up(size()), down(size());
  for (int64_t p = 0; p < size(); ++p) {
    if (p == rank_ || (rank_ != 0 && p != 0)) continue;
    const auto i = static_cast<size_t>(p);
    if (rank_ == 0) up.in[i] = std::as_writable_bytes(std::span(all[i])), down.out[i] = std::as_bytes(values);
    else up.out[i] = std::as_bytes(values), down.in[i] = std::as_writable_bytes(values);
  }
  exchange(what, up);
  for (size_t p = 1; p < all.size(); ++p)
    for (size_t i = 0; i < values.size(); ++i) values[i] += all[p][i];
  exchange(what, down);
}

std::vector<std::string> Mesh::gather(const char* what, const std::string& text) {
  std::vector<double> bytes(static_cast<size_t>(size()), 0);
  bytes[static_cast<size_t>(rank_)] = static_cast<double>(text.size());
  sum(what, bytes);
  std::vector<std::string> all(rank_ == 0 ? bytes.size() : 0);
  Whole x(size());
  if (rank_ != 0) x.out[0] = std::as_bytes(std::span(text));
  for (size_t p = 0; p < all.size(); ++p) {
    all[p].resize(static_cast<size_t>(bytes[p]));
    if (p == 0) all[p] = text;
    else x.in[p] = std::as_writable_bytes(std::span(all[p]));
  }
  exchange(what, x);
  return all;
}

std::string Mesh::broadcast(const char* what, const std::string& text) {
  double bytes = rank_ == 0 ? static_cast<double>(text.size()) : 0;
  sum(what, {&bytes, 1});
  std::string result = text;
  result.resize(static_cast<size_t>(bytes));
  Whole x(size());
  for (int64_t p = 1; p < size() && rank_ == 0; ++p) x.out[static_cast<size_t>(p)] = std::as_bytes(std::span(result));
  if (rank_ != 0) x.in[0] = std::as_writable_bytes(std::span(result));
  exchange(what, x);
  return result;
}

void Mesh::check() {
  if (!broken_.empty()) fail("{}", broken_);
  for (int64_t p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    Header h;
    const auto n = ::recv(sockets_[static_cast<size_t>(p)], &h, sizeof h, MSG_DONTWAIT | MSG_PEEK);
    if (n == 0) lost(p, "a wait", false);
    if (n == sizeof h && h.magic == Header::kMagic && std::strncmp(h.what, kAbort, sizeof h.what) == 0) lost(p, "a wait", true);
  }
}

void Mesh::abort(const std::string& reason) noexcept {
  if (aborted_) return;
  aborted_ = true;
  try {
    Header h;
    name(h.what, kAbort);
    h.call = calls_;
    std::string message(reinterpret_cast<const char*>(&h), sizeof h);
    message += reason.substr(0, static_cast<size_t>(kMaxReason));
    for (size_t p = 0; p < sockets_.size(); ++p) {
      if (sockets_[p] < 0) continue;
      if (!open_frame_[p]) (void)!::send(sockets_[p], message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      ::shutdown(sockets_[p], SHUT_WR);
    }
    // What a peer has sent meanwhile is taken, else closing would take our words back from it.
    const double until = now_s() + kLinger;
    for (const int fd : sockets_) {
      if (fd < 0) continue;
      char rest[4096];
      pollfd p{fd, POLLIN, 0};
      while (now_s() < until && wait(&p, 1, 0.05) >= 0) {
        const auto n = ::recv(fd, rest, sizeof rest, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) break;
      }
    }
  } catch (...) {
    // The connections end all the same.
  }
}

}  // namespace dspark::net
